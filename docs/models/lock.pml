/* The pool's lock between hosts, and its takeover from a host that has gone silent.
 *
 * docs/explanation/coherence.md has V7 and V10..V12; docs/models/README.md says how to read a run. The lock is
 * Lamport's bakery (Communications of the ACM 17(8), 1974), in lines of one writer each and without
 * atomics across hosts: a host that comes back after a fence is what he calls a failed process, its
 * slot reads as 0. A host's processes are one actor, behind the host's own mutex. In the critical
 * section a host counts all records that it believes and appends one, in a line of its own, that
 * grants the next number. So two sections that did not exclude each other grant one number twice.
 *
 * Host 0 is the one that others may suspect, at any time, wrongly or not: it may be dead, or
 * paused at any point and come back. It has epoch 0; fenced, it re-attaches once, with epoch 1.
 * The other hosts do not fail. Who waits for host 0 waits for it last, so at most one host takes
 * over at a time. Takeover: {host 0, closed} in an own line, in memory; then the log of host 0 is
 * counted; then {host 0, cut at count}. Of epoch 0 the records below the cut count, and no others.
 * A record is believed when its fence lines, read after the record, do not say otherwise; while
 * one says closed and not yet where, the reader waits. The owner itself believes its record by the
 * same rule.
 *
 * The memory. A store that is written back and fenced in one go is in memory at some instant
 * between; a load after a full fence, an invalidate and a full fence is of memory at some instant
 * between. So each is one step here, and caches need not be modelled. With a site left out the
 * store stays in the cache until it is evicted (any time, or never), and the load may hit what
 * was loaded before, or 0, filled in the beginning.
 * All waits block and all rounds are bounded, so a search without an invalid end state shows that
 * everybody gets in; nobody gets in twice while another waits (the bypass).
 *
 * variant two: HOSTS=2 ROUNDS=2
 * variant three: HOSTS=3 ROUNDS=1
 * variant watched: HOSTS=2 ROUNDS=2 WATCHED
 *
 * caught SLOT_STORE: two
 * caught SLOT_FENCE: two
 * caught SLOT_LOOK: two
 * caught SLOT_LOOK_FENCE: two
 * caught RECORD_STORE: two
 * caught RECORD_FENCE: two
 * caught RECORD_LOOK: two
 * caught RECORD_LOOK_FENCE: two
 * caught CLOSE_STORE: two
 * caught CLOSE_FENCE: two
 * caught CLOSE_LOOK: two
 * caught CLOSE_LOOK_FENCE: two
 * caught UNLOCK_STORE: two
 * caught UNLOCK_FENCE: two
 * caught CHOOSING: two
 * caught CLOSE: two
 * caught CUT: two
 * caught BELIEF: two
 * caught BELIEF_ORDER: watched
 * caught BELIEF_OWN: two
 * caught CHECK_AFTER: two
 * redundant BELIEF_ORDER: two: V10, V12: who holds the lock has seen the fence already
 * redundant CHECK_BEFORE: two three watched: V10, the check after the append decides alone
 */
#ifndef HOSTS
#define HOSTS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#define RECORDS (ROUNDS + 1) /* in a log: host 0 has one more after its re-attach at most */

#define SLOT(host) (host)
#define FENCE(host) (HOSTS + (host)) /* what this host says about host 0 */
#define RECORD(host, index) (2 * HOSTS + (host) * RECORDS + (index))
#define WRITER(line) \
    ((line) < 2 * HOSTS -> (line) % HOSTS : ((line) - 2 * HOSTS) / RECORDS)
#define LINES (2 * HOSTS + HOSTS * RECORDS)
#define NUMBERS (HOSTS * RECORDS + 1)

/* A slot: {ticket, choosing, epoch}. */
#define SLOT_OF(ticket, choosing, epoch) ((ticket) * 4 + (choosing) * 2 + (epoch))
#define TICKET(slot) ((slot) / 4)
#define CHOOSES(slot) (((slot) / 2) & 1)
#define EPOCH(word) ((word) & 1)
/* A record: {number, epoch}, 0 when there is none. */
#define RECORD_OF(number, epoch) ((number) * 2 + (epoch))
#define NUMBER(record) ((record) / 2)
/* A fence line: 0, closed, or where it is cut. */
#define CLOSED 1
#define CUT_AT(count) (2 + (count))

byte mem[LINES];
byte granted[NUMBERS];    /* ghost: whose record it is, 1 + RECORD_OF-like name; 0: nobody's */
bit believed[RECORDS];    /* ghost: host 0's records of epoch 0 that somebody believed */
bit waiting[HOSTS];       /* ghost: has drawn its ticket */
byte bypass[HOSTS * HOSTS];
bit inside[HOSTS];        /* ghost */
bit fenced;               /* ghost: host 0's epoch 0 is closed in memory */

#define FENCE_ONLY 0
#define WRITE_BACK_ONLY 1
#define WRITE_BACK_AND_FENCE 2
#if defined(MUTANT_SLOT_STORE)
#define SLOT_STORED FENCE_ONLY
#elif defined(MUTANT_SLOT_FENCE)
#define SLOT_STORED WRITE_BACK_ONLY
#else
#define SLOT_STORED WRITE_BACK_AND_FENCE
#endif
#if defined(MUTANT_UNLOCK_STORE)
#define UNLOCK_STORED FENCE_ONLY
#elif defined(MUTANT_UNLOCK_FENCE)
#define UNLOCK_STORED WRITE_BACK_ONLY
#else
#define UNLOCK_STORED WRITE_BACK_AND_FENCE
#endif
#if defined(MUTANT_RECORD_STORE)
#define RECORD_STORED FENCE_ONLY
#elif defined(MUTANT_RECORD_FENCE)
#define RECORD_STORED WRITE_BACK_ONLY
#else
#define RECORD_STORED WRITE_BACK_AND_FENCE
#endif
#if defined(MUTANT_CLOSE_STORE)
#define CLOSE_STORED FENCE_ONLY
#elif defined(MUTANT_CLOSE_FENCE)
#define CLOSE_STORED WRITE_BACK_ONLY
#else
#define CLOSE_STORED WRITE_BACK_AND_FENCE
#endif
/* An invalidate without its fence and a fence without its invalidate are the same to the next load,
 * but for a line that is still dropped at some later fence: the load may hit again or not. */
#if defined(MUTANT_SLOT_LOOK) || defined(MUTANT_SLOT_LOOK_FENCE)
#define SLOT_AFRESH 0
#else
#define SLOT_AFRESH 1
#endif
#if defined(MUTANT_RECORD_LOOK) || defined(MUTANT_RECORD_LOOK_FENCE)
#define RECORD_AFRESH 0
#else
#define RECORD_AFRESH 1
#endif
#if defined(MUTANT_CLOSE_LOOK) || defined(MUTANT_CLOSE_LOOK_FENCE)
#define CLOSE_AFRESH 0
#else
#define CLOSE_AFRESH 1
#endif

#if defined(MUTANT_SLOT_STORE) || defined(MUTANT_SLOT_FENCE) || defined(MUTANT_RECORD_STORE) || \
    defined(MUTANT_RECORD_FENCE) || defined(MUTANT_CLOSE_STORE) || \
    defined(MUTANT_CLOSE_FENCE) || defined(MUTANT_UNLOCK_STORE) || defined(MUTANT_UNLOCK_FENCE)
#define STAYS_CACHED
byte stored[LINES];
bit dirty[LINES];
bit writing[LINES]; /* the write-back has begun and no fence has come */
#endif
#if !SLOT_AFRESH || !RECORD_AFRESH || !CLOSE_AFRESH
#define STALE
byte copy[(HOSTS + 1) * LINES]; /* the last is the watcher's */
#endif

inline settle(first, last) {
    at = first;
    do
    :: at < last ->
        if
        :: (dirty[at] && writing[at]) -> mem[at] = stored[at]; dirty[at] = 0
        :: else
        fi;
        writing[at] = 0;
        at++
    :: else -> break
    od;
    at = 0
}

/* Stored, then written back, then a full fence, or less of it. */
inline keep(line, value, how) {
#ifdef STAYS_CACHED
    d_step {
        stored[line] = value;
        dirty[line] = 1;
        writing[line] = (how != FENCE_ONLY);
        if
        :: how != WRITE_BACK_ONLY ->
            settle(SLOT(me), SLOT(me) + 1);
            settle(FENCE(me), FENCE(me) + 1);
            settle(RECORD(me, 0), RECORD(me, 0) + RECORDS)
        :: else
        fi
    }
#else
    mem[line] = value
#endif
}
inline load(into, line, afresh) {
#ifdef STALE
    atomic {
        if
        :: !(afresh) && WRITER(line) != me -> into = copy[me * LINES + (line)]
        :: into = mem[line]; copy[me * LINES + (line)] = into
        fi
    }
#else
#ifdef STAYS_CACHED
    into = (WRITER(line) == me && dirty[line] -> stored[line] : mem[line])
#else
    into = mem[line]
#endif
#endif
}

/* What the hosts say about epoch 0 of host 0. A host knows its own line. */
inline load_fence() {
    load(fence, FENCE(1), CLOSE_AFRESH);
#if HOSTS > 2
    if
    :: fence == 0 -> load(fence, FENCE(2), CLOSE_AFRESH)
    :: else
    fi
#endif
}

/* Until it is open or cut. */
inline load_fence_decided() {
    load_fence();
    do
    :: fence == CLOSED ->
        (mem[FENCE(1)] != CLOSED
#if HOSTS > 2
         && mem[FENCE(2)] != CLOSED
#endif
        );
        load_fence()
    :: else -> break
    od
}

/* Is host's record, once loaded, to be believed? It counts, or it does not. */
inline believe(host, index, record) {
    skip; /* a jump may not end in a d_step */
    d_step {
        if
        :: (host == 0 && EPOCH(record) == 0 && fence >= 2 && index >= fence - 2) ->
            assert(!believed[index]); /* what one believed, all believe */
            is_believed = 0
        :: else ->
            is_believed = 1;
            name = RECORD(host, index) * 2 + EPOCH(record) + 1;
            assert(granted[NUMBER(record)] == 0 || granted[NUMBER(record)] == name);
            granted[NUMBER(record)] = name;
            name = 0;
            if
            :: (host == 0 && EPOCH(record) == 0) -> believed[index] = 1
            :: else
            fi
        fi
    }
}

#ifdef MUTANT_CUT
#define KEPT 0 /* as if no record of a fenced epoch counted */
#else
#define KEPT other_index
#endif

/* {closed}, count, {cut}. Only own lines are written (V11). */
inline take_over() {
    load_fence();
    if
    :: fence == 0 ->
        atomic {
            assert(!fenced); /* one host at a time */
            fenced = 1
        };
#ifndef MUTANT_CLOSE
        keep(FENCE(me), CLOSED, CLOSE_STORED);
#endif
        other_index = 0;
        do
        :: other_index < RECORDS ->
            load(seen, RECORD(0, other_index), RECORD_AFRESH);
            if
            :: (seen == 0 || EPOCH(seen) == 1) -> break
            :: else -> other_index++
            fi
        :: else -> break
        od;
        skip;
        keep(FENCE(me), CUT_AT(KEPT), CLOSE_STORED);
        d_step { other_index = 0; seen = 0 }
    :: else
    fi;
    fence = 0
}

#define GOES_FIRST(slot, host) \
    (TICKET(slot) != 0 && \
     (TICKET(slot) < ticket || (TICKET(slot) == ticket && (host) < me)))
#ifdef MUTANT_CHOOSING
#define STANDS_BEFORE(slot, host) GOES_FIRST(slot, host)
#else
#define STANDS_BEFORE(slot, host) (CHOOSES(slot) || GOES_FIRST(slot, host))
#endif

inline lock() {
    keep(SLOT(me), SLOT_OF(0, 1, epoch), SLOT_STORED);
    other = 0;
    do
    :: other < HOSTS ->
        if
        :: other != me ->
            load(seen, SLOT(other), SLOT_AFRESH);
            d_step {
                if
                :: TICKET(seen) > ticket -> ticket = TICKET(seen)
                :: else
                fi;
                seen = 0
            }
        :: else
        fi;
        other++
    :: else -> break
    od;
    ticket++;
    atomic {
        keep(SLOT(me), SLOT_OF(ticket, 0, epoch), SLOT_STORED);
        waiting[me] = 1
    };
    do /* from the last host down to host 0: who may be suspected is waited for last */
    :: other > 0 ->
        if
        :: other - 1 == me -> other--
        :: else ->
            load(seen, SLOT(other - 1), SLOT_AFRESH);
            if
            :: !STANDS_BEFORE(seen, other - 1) -> other--
            :: STANDS_BEFORE(seen, other - 1) && other > 1 -> mem[SLOT(other - 1)] != seen
            :: STANDS_BEFORE(seen, other - 1) && other == 1 ->
                fence = 0;
                if
                :: EPOCH(seen) == 0 -> load_fence()
                :: else
                fi;
                if
                :: fence -> other--
                :: else ->
                    fence = 0;
                    if
                    :: mem[SLOT(0)] != seen
                    :: EPOCH(seen) == 0 -> take_over()
                    fi
                fi;
                fence = 0
            fi;
            seen = 0
        fi
    :: else -> break
    od
}

/* A host that re-attached finds its own records behind the cut, as all others do. */
#ifdef MUTANT_BELIEF_OWN
#define ASKS (me != 0)
#else
#define ASKS 1
#endif

/* How many records there are, of all hosts, that this host believes. */
inline count_records() {
    other = 0;
    do
    :: other < HOSTS ->
        other_index = 0;
        do
        :: (other_index < RECORDS) ->
#ifdef MUTANT_BELIEF_ORDER
            if
            :: other == 0 -> load_fence_decided()
            :: else
            fi;
#endif
            load(seen, RECORD(other, other_index), RECORD_AFRESH);
            if
            :: seen == 0 -> break
            :: else
            fi;
#if !defined(MUTANT_BELIEF_ORDER) && !defined(MUTANT_BELIEF)
            if
            :: (other == 0 && EPOCH(seen) == 0 && ASKS) -> load_fence_decided()
            :: else
            fi;
#endif
            believe(other, other_index, seen);
            if
            :: is_believed -> count++
            :: else -> break /* all behind it are of the same epoch, or there are none */
            fi;
            other_index++;
            d_step { fence = 0; seen = 0 }
        :: else -> break
        od;
        skip;
        d_step { fence = 0; seen = 0; other_index = 0; is_believed = 0 };
        other++
    :: else -> break
    od;
    other = 0
}

inline enter() {
    d_step {
        waiting[me] = 0;
        inside[me] = 1;
        other = 0;
        do /* V12, but for a host that is fenced */
        :: other < HOSTS ->
            assert(other == me || !inside[other] || (fenced && (other == 0 || me == 0)));
            if
            :: waiting[other] && !(other == 0 && fenced) ->
                bypass[other * HOSTS + me]++;
                assert(bypass[other * HOSTS + me] <= 1)
            :: else
            fi;
            bypass[me * HOSTS + other] = 0;
            other++
        :: else -> break
        od;
        other = 0
    }
}

/* Only host 0: fence stays 0 where it is not fenced in its epoch. */
inline check_self() {
    if
    :: (me == 0 && epoch == 0) -> load_fence_decided()
    :: else
    fi
}

#define MAY_DIE if :: (me == 0 && epoch == 0) -> goto gone :: 1 fi

proctype host(byte me) {
    byte round, epoch, index; /* the next free record of its own log */
    byte ticket, other, other_index, seen, fence, count, name, at;
    bit is_believed;
    do
    :: round < ROUNDS ->
        round++;
        lock();
        enter();
        MAY_DIE;
#ifndef MUTANT_CHECK_BEFORE
        check_self();
#endif
        if
        :: fence == 0 ->
            count_records();
            keep(RECORD(me, index), RECORD_OF(count + 1, epoch), RECORD_STORED);
            MAY_DIE;
            index++;
            d_step { count++; seen = RECORD_OF(count, epoch); count = 0 };
#ifndef MUTANT_CHECK_AFTER
            check_self();
#endif
            believe(me, index - 1, seen);
            is_believed = 0
        :: else
        fi;
        d_step { inside[me] = 0; ticket = 0; seen = 0 };
        if
        :: fence != 0 -> /* re-attach: a new epoch, behind the records that count */
            d_step { index = fence - 2; epoch = 1; round--; fence = 0; fenced = 0 }
        :: else
        fi;
        keep(SLOT(me), SLOT_OF(0, 0, epoch), UNLOCK_STORED)
    :: else -> break
    od;
gone: skip
}

#ifdef WATCHED
/* Somebody who reads the logs once, without the lock. */
proctype watcher() {
    byte me = HOSTS, other, other_index, seen, fence, count, name;
    bit is_believed;
    count_records()
}
#endif

#ifdef STAYS_CACHED
proctype world() {
    byte line;
    do
    :: line < LINES ->
        if
        :: d_step { dirty[line] -> dirty[line] = 0; writing[line] = 0; mem[line] = stored[line] }
        :: line++
        fi
    :: line == LINES -> line = 0
    :: break
    od
}
#endif

init {
    atomic {
#ifdef STAYS_CACHED
        run world();
#endif
#if HOSTS > 2
        run host(2);
#endif
#ifdef WATCHED
        run watcher();
#endif
        run host(1);
        run host(0)
    }
}
