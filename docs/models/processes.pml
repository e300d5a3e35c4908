/* Two processes of one host among hosts: who queues for the lock between hosts does so outside the
 * host's own lock, and any process may die anywhere.
 *
 * lock.pml has the bakery and the takeover with caches, and one actor a host. Here a host has two
 * processes, and each load and store of shared memory is one step, as that model justifies. The
 * first host has two robust mutexes in its own memory, taken in this order: the claim mutex, which
 * is whose the host's place in the queue, its epoch and its claims are to change, and the host
 * mutex, which guards all else: its heartbeat line and what it says of others (fences). Who finds
 * that an owner died clears what that mutex guards and no more. A process does one of three things
 * in each of its rounds: it claims (the queue, then a record that grants the next number, as in
 * lock.pml), it reads (takes the host mutex and no other), or it keeps (beats; fences the other
 * host as an operator does; takes a new epoch when its host was fenced). The second host has one
 * actor, which may stop for ever anywhere while the first may suspect it (FENCES_OTHER), or may
 * suspect the first (FENCES_US).
 *
 * What must hold: no number is granted twice; what one believed all believe; at most one host that
 * is not fenced is inside; at most one process writes the heartbeat line, or a fence word; nobody
 * waits for another host with the host mutex; and the second host gets in when a process of the
 * first has died, as long as another one lives. Waiting for a host that has stopped is an end.
 *
 * variant stops: STOPS
 * variant fences: STOPS FENCES_OTHER OURS=1
 * variant fenced: FENCES_US THEIRS=1
 *
 * caught CLAIM_MUTEX: stops
 * caught WAIT_OUTSIDE: stops
 * caught RECOVER_SLOT: fenced
 * caught REPAIR_KEEPS_SLOT: stops
 * caught OWNERS_AGAIN: stops
 * caught BEAT_LOCKED: stops
 * caught FENCE_LOCKED: fences
 * caught REPAIR_FENCES: fences
 */
#ifndef THEIRS
#define THEIRS 2
#endif
#ifndef OURS
#define OURS 2 /* rounds of each process */
#endif
#define NOBODY 2
#define RECORDS (2 * OURS + 1)
#define RECORD(host, index) rec[(host) * RECORDS + (index)]
#define RECORD_OF(number, epoch) ((number) * 2 + (epoch))
#define NUMBER(record) ((record) / 2)
#define EPOCH(word) ((word) & 1)
#define SLOT_OF(ticket, choosing, epoch) ((ticket) * 4 + (choosing) * 2 + (epoch))
#define TICKET(slot) ((slot) / 4)
#define CHOOSES(slot) (((slot) / 2) & 1)
#define CLOSED 1
#define CUT_AT(count) (2 + (count))
#define NOTHING 255 /* no fence is to be made */

bit alive[3] = 1;         /* the first host's processes; the last is nobody */
byte claim = NOBODY;      /* who has the first host's mutexes */
byte host = NOBODY;
bit epoch_now;            /* of the first host, in its own memory */
byte slot[2], fence[2];   /* fence[h]: what the other host says of epoch 0 of h */
byte rec[2 * RECORDS];
byte granted[2 * RECORDS + 2];
bit believed[2 * RECORDS], refused[2 * RECORDS]; /* ghosts: of records of epoch 0 */
byte writers_beat, writers_fence, inside[2];
bit closed[2];            /* ghost: it is fenced, or nearly */

#define MAY_DIE if :: alive[me] = 0; goto gone :: 1 fi

/* Robust: who finds that its owner died mends what it guards. */
inline claim_lock() {
#ifdef MUTANT_CLAIM_MUTEX
    skip
#else
    atomic {
        (claim == NOBODY || !alive[claim]) ->
        died = (claim != NOBODY);
        claim = me
    };
#ifndef MUTANT_RECOVER_SLOT
    if
    :: died -> slot[0] = 0
    :: else
    fi;
#endif
    died = 0
#endif
}
inline claim_unlock() {
#ifdef MUTANT_CLAIM_MUTEX
    skip
#else
    claim = NOBODY
#endif
}
inline host_lock() {
    atomic {
        (host == NOBODY || !alive[host]) ->
        if
        :: host != NOBODY -> died = 1; writers_beat = 0; writers_fence = 0
        :: else
        fi;
        host = me
    };
    if
    :: died ->
#ifndef MUTANT_REPAIR_FENCES
        if
        :: fence[1] == CLOSED -> fence[1] = 0
        :: else
        fi;
#endif
#ifdef MUTANT_REPAIR_KEEPS_SLOT
        slot[0] = 0;
#endif
        died = 0
    :: else
    fi
}
#define host_unlock() host = NOBODY

inline beat() {
    atomic { writers_beat++; assert(writers_beat == 1) };
    MAY_DIE;
    writers_beat--
}

/* {closed}, count, {cut}, of epoch 0 of `who`. */
inline take_over(who) {
    if
    :: fence[who] == 0 ->
        atomic { writers_fence++; assert(writers_fence == 1); closed[who] = 1 };
        fence[who] = CLOSED;
        index = 0;
        do
        :: index < RECORDS && RECORD(who, index) != 0 && EPOCH(RECORD(who, index)) == 0 -> index++
        :: else -> break
        od
    :: else -> index = NOTHING
    fi
}
/* Who has died over a fence opened it: then another process of its host does so, here the one that
 * waits. The other host finishes its own. */
inline await_decided(who) {
    do
    :: fence[who] == CLOSED ->
        if
        :: fence[who] != CLOSED
        :: who == 1 && ours -> host_lock(); host_unlock()
        :: !alive[0] && !alive[1] -> goto gone /* undecided until it comes back: lock.pml */
        fi
    :: else -> break
    od
}

inline believe(who, at) {
    d_step {
        name = (who) * RECORDS + (at) + 1;
        assert(EPOCH(seen) == 1 || !refused[name - 1]);
        name = name * 2 + EPOCH(seen);
        assert(granted[NUMBER(seen)] == 0 || granted[NUMBER(seen)] == name);
        granted[NUMBER(seen)] = name;
        if
        :: EPOCH(seen) == 0 -> believed[(who) * RECORDS + (at)] = 1
        :: else
        fi;
        name = 0
    }
}
inline refuse(who, at) {
    d_step {
        assert(!believed[(who) * RECORDS + (at)]); /* what one believed, all believe */
        refused[(who) * RECORDS + (at)] = 1
    }
}

/* All records that count, and where those of `self` end. */
inline count_records(self) {
    count = 0;
    which = 0;
    do
    :: which < 2 ->
        index = 0;
        do
        :: index < RECORDS ->
            seen = RECORD(which, index);
            if
            :: seen == 0 -> break
            :: else
            fi;
            if
            :: EPOCH(seen) == 0 -> await_decided(which)
            :: else
            fi;
            if
            :: EPOCH(seen) == 0 && fence[which] >= 2 && index >= fence[which] - 2 ->
                refuse(which, index);
                break
            :: else -> believe(which, index); count++; index++
            fi
        :: else -> break
        od;
        skip;
        d_step {
            if
            :: which == self -> mine = index
            :: else
            fi;
            which++; index = 0; seen = 0
        }
    :: else -> break
    od;
    which = 0
}

#define GOES_FIRST(slot, ticket, first) \
    (TICKET(slot) != 0 && (TICKET(slot) < ticket || (TICKET(slot) == ticket && (first))))

proctype process(byte me) {
    byte round, ticket, seen, count, index, mine, which, name;
    bit died, epoch, beaten, ours = 1;
    do
    :: round < OURS ->
        round++;
        if
        :: skip; /* reads */
            host_lock();
            MAY_DIE;
            host_unlock()
        :: /* keeps */
            host_lock();
            beat();
#ifdef FENCES_OTHER
#ifdef MUTANT_FENCE_LOCKED
            host_unlock();
#endif
            take_over(1);
            MAY_DIE;
            if
            :: index != NOTHING -> fence[1] = CUT_AT(index); writers_fence--
            :: else
            fi;
            index = 0;
#ifdef MUTANT_FENCE_LOCKED
            host_lock();
#endif
#endif
            host_unlock();
#ifdef FENCES_US
            if
            :: fence[0] >= 2 && epoch_now == 0 ->
                skip;
end_keep:       claim_lock();
                MAY_DIE;
                host_lock();
                slot[0] = 0;
                epoch_now = 1;
                host_unlock();
                claim_unlock()
            :: else
            fi
#endif
        :: skip; /* claims */
end_claim:  claim_lock();
            epoch = epoch_now;
            MAY_DIE;
#ifdef MUTANT_OWNERS_AGAIN
            count_records(0);
#endif
            slot[0] = SLOT_OF(0, 1, epoch);
            MAY_DIE;
            ticket = TICKET(slot[1]) + 1;
            slot[0] = SLOT_OF(ticket, 0, epoch);
            MAY_DIE;
#ifdef MUTANT_WAIT_OUTSIDE
            host_lock();
#endif
            do
            :: 1 ->
                seen = slot[1];
                if
                :: !(CHOOSES(seen) || GOES_FIRST(seen, ticket, false)) -> break
                :: fence[1] >= 2 -> break
                :: else
                fi;
end_wait:       if
                :: slot[1] != seen || fence[1] >= 2
#ifndef MUTANT_WAIT_OUTSIDE
                :: !beaten -> /* beats go on: by who waits, too */
#ifndef MUTANT_BEAT_LOCKED
                    host_lock();
#endif
                    beat();
#ifndef MUTANT_BEAT_LOCKED
                    host_unlock();
#endif
                    beaten = 1
#ifdef FENCES_OTHER
                :: fence[1] < 2 -> /* it is silent */
#ifndef MUTANT_FENCE_LOCKED
                    host_lock();
#endif
                    take_over(1);
                    MAY_DIE;
                    if
                    :: index != NOTHING -> fence[1] = CUT_AT(index); writers_fence--
                    :: else
                    fi;
                    index = 0;
#ifndef MUTANT_FENCE_LOCKED
                    host_unlock()
#endif
#endif
#endif
                fi
            od;
#ifdef MUTANT_WAIT_OUTSIDE
            host_unlock();
#endif
            skip;
            d_step {
                beaten = 0;
                seen = 0;
                inside[0]++;
                assert(inside[0] == 1 && (inside[1] == 0 || closed[0] || closed[1]))
            };
            if
            :: 1
            :: d_step { inside[0]--; alive[me] = 0 }; goto gone
            fi;
            await_decided(0);
            if
            :: !(fence[0] >= 2 && epoch == 0) ->
#ifndef MUTANT_OWNERS_AGAIN
                count_records(0);
#endif
                RECORD(0, mine) = RECORD_OF(count + 1, epoch);
                if
                :: 1
                :: d_step { inside[0]--; alive[me] = 0 }; goto gone
                fi;
                seen = RECORD_OF(count + 1, epoch);
                await_decided(0);
                if
                :: fence[0] >= 2 && epoch == 0 && mine >= fence[0] - 2 -> refuse(0, mine)
                :: else -> believe(0, mine)
                fi
            :: else
            fi;
            d_step { inside[0]--; seen = 0; count = 0; mine = 0; ticket = 0; epoch = 0 };
            slot[0] = SLOT_OF(0, 0, 0);
            MAY_DIE;
            claim_unlock()
        fi
    :: else -> break
    od;
end_idle: /* its keeper goes on: what a dead process had is mended */
    do
    :: claim != NOBODY && !alive[claim] -> claim_lock(); claim_unlock()
    :: host != NOBODY && !alive[host] -> host_lock(); host_unlock()
    od;
gone: skip
}

#ifdef STOPS
#define MAY_STOP if :: goto gone :: 1 fi
#else
#define MAY_STOP skip
#endif

proctype other() {
    byte round, ticket, seen, count, index, mine, which, name;
    bit ours;
    bit died; /* never: it has no other process */
    byte me = NOBODY;
    do
    :: round < THEIRS && fence[1] < 2 ->
        round++;
        slot[1] = SLOT_OF(0, 1, 0);
        MAY_STOP;
        ticket = TICKET(slot[0]) + 1;
        slot[1] = SLOT_OF(ticket, 0, 0);
        MAY_STOP;
        do
        :: 1 ->
            seen = slot[0];
            if
            :: !(CHOOSES(seen) || GOES_FIRST(seen, ticket, true)) -> break
            :: EPOCH(seen) == 0 && fence[0] >= 2 -> break
            :: else
            fi;
            if
            :: slot[0] != seen || (!alive[0] && !alive[1]) || fence[1] >= 2
#ifdef FENCES_US
            :: EPOCH(seen) == 0 && fence[0] == 0 ->
                take_over(0);
                fence[0] = CUT_AT(index);
                writers_fence--;
                index = 0
#endif
            fi;
            if
            :: (!alive[0] && !alive[1]) || fence[1] >= 2 -> goto gone
            :: else
            fi
        od;
        skip; /* a jump may not end in a d_step */
        d_step {
            seen = 0;
            inside[1]++;
            assert(inside[0] == 0 || closed[0] || closed[1])
        };
        if
        :: 1
#ifdef STOPS
        :: inside[1]--; goto gone
#endif
        fi;
        count_records(1);
        RECORD(1, mine) = RECORD_OF(count + 1, 0);
        seen = RECORD_OF(count + 1, 0);
        await_decided(1);
        if
        :: fence[1] >= 2 && mine >= fence[1] - 2 -> refuse(1, mine)
        :: else -> believe(1, mine)
        fi;
        d_step { inside[1]--; seen = 0; count = 0; mine = 0; ticket = 0 };
        slot[1] = 0;
        MAY_STOP
    :: else -> break
    od;
gone: skip
}

init {
    atomic {
        run process(0);
        run process(1);
        run other()
    }
}
