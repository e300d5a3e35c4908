/* Publish, acquire, free and reuse of one record between hosts whose caches do not see each other.
 *
 * docs/explanation/coherence.md has the protocol and the invariants V1..V6; docs/models/README.md says how to
 * read a run. One owner publishes GENERATIONS generations one after the other; each of READERS
 * hosts pins the page, acquires what is sealed and reads it in place, any number of times, before
 * it unpins; until it has the last one. Every flush, fence and check is a macro named as in
 * native/src/base/flush.h; -DMUTANT_<SITE> leaves it out.
 *
 * The memory. Each line holds a number: which generation wrote it, or for the descriptor 2 *
 * generation + sealed, or a reader's pin. A store stays in its host's cache until it is
 * evicted (any time) or written back (surely at the next fence). Non-temporal stores reach memory
 * in any order, surely at the fence. A host may fill any line at any time, and an invalidate is
 * done at any time up to the next full fence, so that a load before it may hit what was there. A
 * clean copy is never absent here: being filled at any time covers that, since a line that is
 * dropped and filled again behaves the same as one that is refreshed. Only lines that a host loads
 * are filled: the reader's D, H and P, the owner's R.
 * An invalidate is not ordered after the loads before it (Intel SDM, CLFLUSHOPT; the same for DC
 * CIVAC): without a full fence between them it may be done first. Other loads and stores are in
 * program order. A store and the beginning of its write-back are one step, which loses nothing; an
 * invalidate and its fence are two, for without a fence before it the line may be dropped and
 * filled again before an older store is in memory (PIN_FENCE).
 * UNPIN_BEGIN_FENCE left out: a load may be late (arm64), so the pin may go before what is read in
 * place is read. OWNER_LOOK_BEGIN_FENCE left out: another process of the owner's host has freed,
 * and the lines of pins were dropped before this one learned of it.
 * `world` may stop at any time: nothing spontaneous is promised. So whoever waits for what only an
 * eviction or a fill would bring is stuck, and spin calls it an invalid end state.
 *
 * Two guards keep a reader from a record that changes under it, V3 (re-check) and V6 (the owner
 * waits). Each alone must do, so each is also checked without the other. `pair` is about two
 * readers' pins, so that payload and header are filled by the readers' own loads only:
 * variant both: READERS=1 GENERATIONS=3
 * variant pair: READERS=2 GENERATIONS=2 NO_RECHECK NO_PAYLOAD_FILLS
 * variant pins: READERS=1 GENERATIONS=3 NO_RECHECK
 * variant recheck: READERS=1 GENERATIONS=3 NO_PINS
 *
 * What must fail, and where:
 * caught PUBLISH_HEADER: pins recheck
 * caught PUBLISH_PAYLOAD_FENCE: pins recheck
 * caught PUBLISH_DESCRIPTOR: pins recheck
 * caught PUBLISH_FENCE: pins recheck
 * caught ACQUIRE_DESCRIPTOR: pins recheck
 * caught ACQUIRE_DESCRIPTOR_FENCE: pins recheck
 * caught ACQUIRE_SEEN_FENCE: pins recheck
 * caught ACQUIRE_PAYLOAD: pins recheck
 * caught ACQUIRE_PAYLOAD_FENCE: pins recheck
 * caught ACQUIRE_COPIED_FENCE: recheck
 * caught ACQUIRE_RECHECK: recheck
 * caught ACQUIRE_RECHECK_FENCE: recheck
 * caught RECHECK: recheck
 * caught FREE_DESCRIPTOR: pins recheck
 * caught FREE_FENCE: recheck
 * caught GENERATION: recheck
 * caught PIN: pins
 * caught PIN_FENCE: pins
 * caught UNPIN_BEGIN_FENCE: pins
 * caught UNPIN: pins
 * caught UNPIN_FENCE: pins
 * caught OWNER_LOOK_BEGIN_FENCE: pins
 * caught OWNER_LOOK: pins
 * caught OWNER_LOOK_FENCE: pins
 * caught OWNER_WAIT: pins
 */
#ifndef READERS
#define READERS 1
#endif
#ifndef GENERATIONS
#define GENERATIONS 3
#endif

#define D 0 /* descriptor */
#define H 1 /* header */
#define P 2 /* payload, two lines, so that a torn copy shows */
#define Q 3
#define R 4 /* the readers' pins */
#define LINES (R + READERS)
#define HOSTS (1 + READERS)
#define OWNER 0
#define READER(i) (1 + (i))
#define AT(host, line) ((host) * LINES + (line))

byte mem[LINES];
byte copy[HOSTS * LINES];    /* what a host's cache holds */
bit dirty[HOSTS * LINES];    /* stored there, not in memory */
bit writing[HOSTS * LINES];  /* its write-back has begun */
bit dropping[HOSTS * LINES]; /* its invalidate has begun */
byte passing[LINES];         /* the owner's non-temporal stores on their way; 0: none */
bit inside[READERS];         /* ghost: saw a sealed descriptor and may still read */

#define SEALED(descriptor) ((descriptor) & 1)

#ifdef READS_ONLY
#define HOLDS(claim) skip
#else
#define HOLDS(claim) assert(claim)
#endif

inline arrive(line, value) {
    if
    :: (line == D && SEALED(value)) -> /* V1 */
        HOLDS(mem[H] != 0 && mem[H] == mem[P] && mem[P] == mem[Q])
    :: (line == H || line == P || line == Q) -> HOLDS(!SEALED(mem[D])) /* V2 */
    :: else
    fi;
    mem[line] = value
}

inline store(host, line, value) {
    d_step {
        copy[AT(host, line)] = value;
        dirty[AT(host, line)] = 1;
        writing[AT(host, line)] = 0
    }
}

inline settle(host, line) {
    if
    :: (dirty[AT(host, line)] && writing[AT(host, line)]) ->
        dirty[AT(host, line)] = 0;
        arrive(line, copy[AT(host, line)])
    :: else
    fi;
    writing[AT(host, line)] = 0
}

inline land(line) {
    if
    :: passing[line] -> arrive(line, passing[line]); passing[line] = 0
    :: else
    fi
}

inline refresh(host, line) {
    copy[AT(host, line)] = mem[line];
    dropping[AT(host, line)] = 0
}

inline refresh_dropped(host, line) {
    if
    :: dropping[AT(host, line)] -> refresh(host, line)
    :: else
    fi
}

inline write_back(host, line) { writing[AT(host, line)] = 1 }
inline invalidate(host, line) { dropping[AT(host, line)] = 1 }

/* The order within a fence does not matter: `world` may have done any part of it before. */
inline owner_fence_stores() {
    d_step { land(P); land(Q); settle(OWNER, H); settle(OWNER, D) }
}
inline owner_fence_all() {
    d_step {
        land(P); land(Q); settle(OWNER, H); settle(OWNER, D);
        refresh_dropped(OWNER, R)
#if READERS > 1
        ; refresh_dropped(OWNER, R + 1)
#endif
    }
}
inline reader_fence_all(host, line) {
    d_step {
        settle(host, line);
        refresh_dropped(host, D); refresh_dropped(host, H);
        refresh_dropped(host, P); refresh_dropped(host, Q)
    }
}
inline reader_fence_stores(host, line) { d_step { settle(host, line) } }

/* The sites. */
#ifdef MUTANT_PUBLISH_HEADER
#define PUBLISH_HEADER skip
#else
#define PUBLISH_HEADER write_back(OWNER, H)
#endif
#ifdef MUTANT_PUBLISH_PAYLOAD_FENCE
#define PUBLISH_PAYLOAD_FENCE skip
#else
#define PUBLISH_PAYLOAD_FENCE owner_fence_stores()
#endif
#ifdef MUTANT_PUBLISH_DESCRIPTOR
#define PUBLISH_DESCRIPTOR skip
#else
#define PUBLISH_DESCRIPTOR write_back(OWNER, D)
#endif
#ifdef MUTANT_PUBLISH_FENCE
#define PUBLISH_FENCE skip
#else
#define PUBLISH_FENCE owner_fence_stores()
#endif
#ifdef MUTANT_FREE_DESCRIPTOR
#define FREE_DESCRIPTOR skip
#else
#define FREE_DESCRIPTOR write_back(OWNER, D)
#endif
#ifdef MUTANT_FREE_FENCE
#define FREE_FENCE skip
#else
#define FREE_FENCE owner_fence_stores()
#endif
/* Without it the descriptor looks the same again and again, and a reader need not wait for it. */
#ifdef MUTANT_GENERATION
#define GENERATION(g) 1
#define LOOKS_SAME 1
#else
#define GENERATION(g) (g)
#define LOOKS_SAME 0
#endif
/* With the fence in place the invalidate stands after the free; without it, it may come first. */
#ifdef MUTANT_OWNER_LOOK_BEGIN_FENCE
#define OWNER_LOOK_EARLY if :: early = 1; OWNER_LOOK(R) :: skip fi
#define OWNER_LOOK_BEGIN_FENCE skip
#else
#define OWNER_LOOK_EARLY skip
#define OWNER_LOOK_BEGIN_FENCE owner_fence_all()
#endif
#ifdef MUTANT_OWNER_LOOK
#define OWNER_LOOK(line) skip
#define LOOKS_AFRESH 0
#else
#define OWNER_LOOK(line) invalidate(OWNER, line)
#endif
#ifdef MUTANT_OWNER_LOOK_FENCE
#define OWNER_LOOK_FENCE skip
#define LOOKS_AFRESH 0
#else
#define OWNER_LOOK_FENCE owner_fence_all()
#endif
#ifndef LOOKS_AFRESH
#define LOOKS_AFRESH 1
#endif

#ifdef MUTANT_PIN
#define PIN skip
#else
#define PIN write_back(host, mine)
#endif
#ifdef MUTANT_PIN_FENCE
#define PIN_FENCE skip
#else
#define PIN_FENCE reader_fence_all(host, mine)
#endif
#ifdef MUTANT_UNPIN
#define UNPIN skip
#else
#define UNPIN write_back(host, mine)
#endif
#define CLEAR atomic { store(host, mine, 0); UNPIN }
#ifdef MUTANT_UNPIN_BEGIN_FENCE
#define UNPIN_EARLY if :: cleared = 1; CLEAR :: skip fi
#define UNPIN_BEGIN_FENCE skip
#else
#define UNPIN_EARLY skip
#define UNPIN_BEGIN_FENCE reader_fence_all(host, mine)
#endif
#ifdef MUTANT_UNPIN_FENCE
#define UNPIN_FENCE skip
#else
#define UNPIN_FENCE reader_fence_stores(host, mine)
#endif
#ifdef MUTANT_ACQUIRE_DESCRIPTOR
#define ACQUIRE_DESCRIPTOR skip
#define ACQUIRES_AFRESH 0
#else
#define ACQUIRE_DESCRIPTOR invalidate(host, D)
#endif
#ifdef MUTANT_ACQUIRE_DESCRIPTOR_FENCE
#define ACQUIRE_DESCRIPTOR_FENCE skip
#define ACQUIRES_AFRESH 0
#else
#define ACQUIRE_DESCRIPTOR_FENCE reader_fence_all(host, mine)
#endif
#ifndef ACQUIRES_AFRESH
#define ACQUIRES_AFRESH 1
#endif
#ifdef MUTANT_ACQUIRE_PAYLOAD
#define ACQUIRE_PAYLOAD skip
#else
#define ACQUIRE_PAYLOAD d_step { invalidate(host, H); invalidate(host, P); invalidate(host, Q) }
#endif
#ifdef MUTANT_ACQUIRE_PAYLOAD_FENCE
#define ACQUIRE_PAYLOAD_FENCE skip
#else
#define ACQUIRE_PAYLOAD_FENCE reader_fence_all(host, mine)
#endif
/* With the fence in place the invalidate stands after the load; without it, it may come first. */
#ifdef MUTANT_ACQUIRE_SEEN_FENCE
#define ACQUIRE_PAYLOAD_EARLY if :: early = 1; ACQUIRE_PAYLOAD :: skip fi
#else
#define ACQUIRE_PAYLOAD_EARLY skip
#endif
#ifdef MUTANT_ACQUIRE_RECHECK
#define ACQUIRE_RECHECK skip
#else
#define ACQUIRE_RECHECK invalidate(host, D)
#endif
#ifdef MUTANT_ACQUIRE_RECHECK_FENCE
#define ACQUIRE_RECHECK_FENCE skip
#else
#define ACQUIRE_RECHECK_FENCE reader_fence_all(host, mine)
#endif
#if defined(MUTANT_ACQUIRE_COPIED_FENCE) && !defined(NO_RECHECK)
#define ACQUIRE_RECHECK_EARLY if :: early = 1; ACQUIRE_RECHECK :: skip fi
#else
#define ACQUIRE_RECHECK_EARLY skip
#endif
#ifdef MUTANT_RECHECK
#define UNCHANGED 1
#else
#define UNCHANGED (first == second)
#endif

/* V6: the pin was clear when read after V5. */
inline wait_for(line) {
    OWNER_LOOK_BEGIN_FENCE;
    if :: early :: else -> OWNER_LOOK(line) fi;
    early = 0;
    OWNER_LOOK_FENCE;
    do
    :: !copy[AT(OWNER, line)] -> break
    :: else ->
        (!copy[AT(OWNER, line)] || (LOOKS_AFRESH && !mem[line]));
        OWNER_LOOK(line);
        OWNER_LOOK_FENCE
    od
}

proctype owner() {
    byte generation = 1;
    bit early;
    do
    :: 1 ->
        d_step {
            HOLDS(mem[D] == 2 * GENERATION(generation)); /* V5 */
#ifndef NO_PINS
            HOLDS(!inside[0]); /* V6 */
#if READERS > 1
            HOLDS(!inside[1]);
#endif
#endif
            passing[P] = generation;
            passing[Q] = generation
        };
        atomic { store(OWNER, H, generation); PUBLISH_HEADER };
        PUBLISH_PAYLOAD_FENCE;
        atomic { store(OWNER, D, 2 * GENERATION(generation) + 1); PUBLISH_DESCRIPTOR };
        PUBLISH_FENCE;
        if
        :: generation == GENERATIONS -> break
        :: else
        fi;
        generation++;
        OWNER_LOOK_EARLY;
        atomic { store(OWNER, D, 2 * GENERATION(generation)); FREE_DESCRIPTOR };
        FREE_FENCE;
#if !defined(NO_PINS) && !defined(MUTANT_OWNER_WAIT)
        wait_for(R);
#if READERS > 1
        wait_for(R + 1);
#endif
#endif
    od
}

proctype reader(byte i) {
    byte host = READER(i), mine = R + i, first, second, header, one, two;
    bit early, cleared;
    do
    :: 1 ->
#ifndef NO_PINS
        atomic { store(host, mine, 1); PIN };
        PIN_FENCE;
#endif
        ACQUIRE_DESCRIPTOR;
        ACQUIRE_DESCRIPTOR_FENCE;
        ACQUIRE_PAYLOAD_EARLY;
        d_step { first = copy[AT(host, D)]; inside[i] = SEALED(first) };
        if
        :: SEALED(first) ->
            if :: early :: else -> ACQUIRE_PAYLOAD fi;
            early = 0;
            ACQUIRE_PAYLOAD_FENCE;
            ACQUIRE_RECHECK_EARLY;
            header = copy[AT(host, H)];
            one = copy[AT(host, P)];
            two = copy[AT(host, Q)];
#ifdef NO_RECHECK
            second = first;
#else
            if :: early :: else -> ACQUIRE_RECHECK fi;
            early = 0;
            ACQUIRE_RECHECK_FENCE;
            second = copy[AT(host, D)];
#endif
            if
            :: UNCHANGED ->
                assert(header == one && one == two); /* not torn */
#ifndef MUTANT_GENERATION
                assert(one == first / 2); /* not stale, not reclaimed */
#endif
#ifndef NO_PINS
                UNPIN_EARLY;
                do /* in place: what is cached stays right */
                :: header = copy[AT(host, H)];
                    one = copy[AT(host, P)];
                    two = copy[AT(host, Q)];
                    assert(header == one && one == two && one == first / 2)
                :: break
                od
#endif
            :: else
            fi
        :: else -> second = first; early = 0
        fi;
#ifndef NO_PINS
        UNPIN_BEGIN_FENCE;
        inside[i] = 0;
        if :: cleared :: else -> CLEAR fi;
        cleared = 0;
        UNPIN_FENCE;
#endif
        if
        :: (UNCHANGED && one == GENERATIONS) -> break
        :: else
        fi;
        d_step { header = 0; one = 0; two = 0 };
        if
        :: first == second ->
            (LOOKS_SAME || copy[AT(host, D)] != first || (ACQUIRES_AFRESH && mem[D] != first))
        :: else
        fi;
        d_step { first = 0; second = 0 }
    od
}

#define FILL(host, line) \
    d_step { \
        (copy[AT(host, line)] != mem[line] || dropping[AT(host, line)]) -> refresh(host, line) \
    }
#define EVICT(host, line) \
    d_step { \
        dirty[AT(host, line)] -> \
        dirty[AT(host, line)] = 0; writing[AT(host, line)] = 0; \
        arrive(line, copy[AT(host, line)]) \
    }
#define LAND(line) \
    d_step { passing[line] -> land(line) }

/* What caches and buffers do on their own. */
proctype world() {
    do
    :: LAND(P)
    :: LAND(Q)
    :: EVICT(OWNER, H)
    :: EVICT(OWNER, D)
    :: FILL(READER(0), D)
#ifndef NO_PAYLOAD_FILLS
    :: FILL(READER(0), H)
    :: FILL(READER(0), P)
    :: FILL(READER(0), Q)
#endif
#ifndef NO_PINS
    :: EVICT(READER(0), R)
    :: FILL(OWNER, R)
#endif
#if READERS > 1
    :: FILL(READER(1), D)
#ifndef NO_PINS
    :: EVICT(READER(1), R + 1)
    :: FILL(OWNER, R + 1)
#endif
#endif
    :: break
    od
}

init {
    atomic {
        mem[D] = 2;
        copy[AT(READER(0), D)] = 2;
#if READERS > 1
        copy[AT(READER(1), D)] = 2;
        run reader(1);
#endif
        run reader(0);
        run owner();
        run world()
    }
}
