/* A state checkpoint of two pages, of one text, that two hosts publish, displace, evict and read.
 *
 * docs/decisions/0043-states.md says what a checkpoint is, docs/models/README.md how to read a run.
 * The code: publish_pages() and states_find() in native/src/prefix/states.c, page_displace() in
 * native/src/pages/published.c, pages_free_word() in native/src/pages/pages.c, host_rebuild() and
 * log_reader.c. publish.pml shows that what a host reads of a record under a pin is what its owner
 * sealed; so a load, or a store, of memory is one step here, and caches need not be modelled.
 *
 * Each page has one owner, which writes it; place 0 is of a checkpoint's first page, place 1 of the
 * other. A publication is a number, which stands in the bytes of its pages; the first page's table
 * has the number of the other. Whatever a host does is under its own lock, but for writing pages,
 * which are held meanwhile, and reading. A host finds pages by its index, which follows the other
 * host's log: a hint, which may be lost. A page's holders on its owner's host are counted; another
 * host's reader pins it.
 *
 * ROUNDS0 and ROUNDS1 publications come from a process of each host, TWIN from a second one of host
 * 0. After each, one of the host's own pages may be evicted. KILLS of the processes of host 0 die,
 * at any step; who locks it next builds the index from the descriptors, and drops what the dead
 * held. A reader of host 1 matches once.
 *
 * What must hold: whoever reads has two pages of one publication, as long as it holds them; a host
 * finds what it has published until it displaces or evicts it; nobody displaces what is whole; the
 * first page comes last; in the end all pages come back, and no pin is left.
 *
 * variant hosts: ROUNDS0=2 ROUNDS1=1
 * variant twins: ROUNDS0=1 TWIN=1
 * variant killed: ROUNDS0=1 TWIN=1 KILLS=1
 * variant crossed: ROUNDS0=1 ROUNDS1=1 KILLS=1
 *
 * caught TABLE: hosts crossed
 * caught PIN: hosts twins
 * caught PINNED_LOOK: hosts
 * caught LOOK: hosts twins
 * redundant LATE_LOOK: twins: a match takes published pages only; a handle would take it
 * caught LET_GO: hosts
 * caught DISPLACE: hosts killed
 * caught DISPLACE_FOREIGN: hosts
 * caught ORDER: twins
 * caught SECOND_LOOK: twins
 * caught REAP: killed crossed
 */
#ifndef ROUNDS0
#define ROUNDS0 0
#endif
#ifndef ROUNDS1
#define ROUNDS1 0
#endif
#ifndef TWIN
#define TWIN 0
#endif
#ifndef KILLS
#define KILLS 0
#endif

#define OWN 4 /* pages of a host: two checkpoints */
#define PAGES (2 * OWN)
#define NONE PAGES
#define OURS(host, page) ((page) / OWN == (host))
#define INDEX(host, place) index[2 * (host) + (place)]
#define VIEW(host, page) view[PAGES * (host) + (page)]
#define HELD(host, page) held[PAGES * (host) + (page)]

#define FREE 0
#define SEALED 1
#define PUBLISHED 2

/* Memory. */
byte state[PAGES], generation[PAGES], place_of[PAGES]; /* descriptors */
byte content[PAGES];   /* the publication that wrote it */
bit pin[PAGES];        /* by the host that is not its owner */
chan log0 = [6] of { bit, byte, byte, byte };
chan log1 = [6] of { bit, byte, byte, byte };

/* Host states. */
byte index[4];
byte view[2 * PAGES];  /* the generation of another host's page, as the index has it */
byte held[2 * PAGES];
bit is_free[PAGES], withdrawn[PAGES];
bit locked[2];
byte finished;

byte kills = KILLS;
bit whole[2];          /* ghost: it has published one, and has not displaced or evicted it */

#ifdef READS_ONLY
#define HOLDS(claim) skip
#else
#define HOLDS(claim) assert(claim)
#endif

inline lock(host) { atomic { !locked[host]; locked[host] = 1 } }
inline unlock(host) { locked[host] = 0 }

/* One that is full is not followed. */
#define LOG(host, is_free, page, place) \
    if \
    :: !host -> SEND(log0, is_free, page, place) \
    :: host -> SEND(log1, is_free, page, place) \
    fi
#define SEND(log, is_free, page, place) \
    if \
    :: full(log) \
    :: nfull(log) -> log ! is_free, page, generation[page], place \
    fi

/* ---- logs ---- */

inline learn(host) {
    known = INDEX(host, seen_place);
    if
    :: HELD(host, seen_page) && VIEW(host, seen_page) != seen_generation
    :: else ->
        if
        :: known != NONE && OURS(host, known) /* its own stays */
        :: else ->
            if
            :: (known == NONE && INDEX(host, 1 - seen_place) != seen_page &&
                VIEW(host, seen_page) <= seen_generation) ||
               (state[seen_page] == PUBLISHED && generation[seen_page] == seen_generation &&
                place_of[seen_page] == seen_place) ->
                INDEX(host, seen_place) = seen_page;
                if
                :: INDEX(host, 1 - seen_place) == seen_page -> INDEX(host, 1 - seen_place) = NONE
                :: else
                fi;
                VIEW(host, seen_page) = seen_generation
            :: else
            fi
        fi
    fi
}

inline apply(host) {
    if
    :: seen_free ->
        if
        :: INDEX(host, seen_place) == seen_page && VIEW(host, seen_page) <= seen_generation ->
            INDEX(host, seen_place) = NONE
        :: else
        fi
    :: !seen_free && INDEX(host, seen_place) != seen_page -> learn(host)
    :: else
    fi
}

inline follow(host) {
    atomic {
        do
        :: !host && nempty(log1) ->
            log1 ? seen_free, seen_page, seen_generation, seen_place; apply(host)
        :: host && nempty(log0) ->
            log0 ? seen_free, seen_page, seen_generation, seen_place; apply(host)
        :: (!host && empty(log1)) || (host && empty(log0)) -> break
        od;
        known = 0; seen_free = 0; seen_page = 0; seen_generation = 0; seen_place = 0
    }
}

/* ---- pages are given up ---- */

#define UNPIN(host, page) \
    if \
    :: HELD(host, page) == 0 -> pin[page] = 0 \
    :: else \
    fi

#ifdef MUTANT_LOOK
#define LOOK(page) 0
#else
#define LOOK(page) pin[page]
#endif
#ifdef MUTANT_LATE_LOOK
#define LATE_LOOK(page) 0
#else
#define LATE_LOOK(page) LOOK(page)
#endif

/* An own page that nothing on this host needs is free, or withdrawn. */
inline settle(host, page) {
    over = !HELD(host, page) && state[page] != PUBLISHED && !is_free[page];
    atomic {
        if
        :: over && LOOK(page) -> withdrawn[page] = 1; over = 0
        :: else
        fi
    };
    if
    :: over ->
        d_step { before = state[page]; state[page] = FREE; generation[page]++; over = 0 };
        atomic {
            if
            :: LATE_LOOK(page) -> state[page] = before; generation[page]--; withdrawn[page] = 1
            :: else -> is_free[page] = 1
            fi;
            before = 0
        }
    :: else
    fi
}

inline withdrawn_look(host) {
    each = OWN * host;
    do
    :: each < OWN * host + OWN ->
        if
        :: withdrawn[each] -> withdrawn[each] = 0; settle(host, each)
        :: else
        fi;
        each++
    :: else -> break
    od;
    each = 0
}

inline drop(host, page) {
    HELD(host, page)--;
    if
    :: OURS(host, page) -> settle(host, page)
    :: else -> atomic { UNPIN(host, page) }
    fi
}

/* page_forget() of an own page; the other host is told. */
inline forget(host, page, place) {
    d_step { INDEX(host, place) = NONE; whole[host] = 0; state[page] = SEALED };
    atomic { LOG(host, 1, page, place) };
    settle(host, page)
}

/* ---- find ---- */

/* found: both pages are there, pinned where they are the other host's, and of one publication. */
inline find_page(host, place, page, number) {
    atomic {
        page = INDEX(host, place);
        if
        :: page == NONE -> found = 0
        :: page != NONE && state[page] == PUBLISHED && place_of[page] == place ->
            number = content[page];
            if
            :: !OURS(host, page) && !HELD(host, page) -> VIEW(host, page) = generation[page]
            :: else
            fi
        :: else -> INDEX(host, place) = NONE; found = 0
        fi
    }
}

#ifdef MUTANT_PIN
#define PIN(page) skip
#else
#define PIN(page) pin[page] = 1
#endif
#ifdef MUTANT_PINNED_LOOK
#define STILL(host, page) 1
#else
#define STILL(host, page) \
    (HELD(host, page) || (state[page] == PUBLISHED && generation[page] == VIEW(host, page)))
#endif

inline borrow(host, page) {
    atomic {
        if
        :: found && !OURS(host, page) && !HELD(host, page) -> PIN(page)
        :: else
        fi
    }
}
inline check(host, page) {
    atomic {
        if
        :: found && !OURS(host, page) && !STILL(host, page) -> found = 0
        :: else
        fi
    }
}

inline let_go(host, page) {
    atomic {
        if
        :: page != NONE && !OURS(host, page) -> UNPIN(host, page)
        :: else
        fi
    }
}

#ifdef MUTANT_TABLE
#define OF_ONE(first, number) 1
#else
#define OF_ONE(first, number) (content[first] == number)
#endif
#ifdef MUTANT_LET_GO
#define LET_GO(host, page) skip
#else
#define LET_GO(host, page) let_go(host, page)
#endif

inline find(host) {
    found = 1;
    find_page(host, 0, first, number);
    if
    :: found -> find_page(host, 1, other, number)
    :: else
    fi;
    if
    :: found ->
        borrow(host, first);
        borrow(host, other);
        check(host, first);
        check(host, other);
        atomic {
            if
            :: found && !OF_ONE(first, number) -> found = 0
            :: else
            fi
        };
        if
        :: !found -> LET_GO(host, first); LET_GO(host, other)
        :: else
        fi
    :: else
    fi;
    number = 0;
    HOLDS(found || !whole[host])
}

/* is_whole() */
inline look(host) {
    find(host);
    if
    :: found -> let_go(host, first); let_go(host, other)
    :: else
    fi
}

/* ---- publish ---- */

inline take(host, page) {
    d_step {
        each = OWN * host;
        page = NONE;
        do
        :: each < OWN * host + OWN ->
            if
            :: page == NONE && is_free[each] ->
                page = each; is_free[each] = 0; HELD(host, each) = 1
            :: else
            fi;
            each++
        :: else -> break
        od;
        each = 0
    }
}

#if KILLS
#define DIE \
    if \
    :: kills && !host -> kills--; goto dead \
    :: skip \
    fi
#else
#define DIE skip
#endif

#ifdef MUTANT_DISPLACE_FOREIGN
#define DISPLACE_FOREIGN(host, page, place) INDEX(host, place) = NONE; state[page] = SEALED
#else
#define DISPLACE_FOREIGN(host, page, place) INDEX(host, place) = NONE
#endif
/* Room under the place for the page. */
inline displace(host, place) {
    known = INDEX(host, place);
    if
    :: known == NONE
    :: known != NONE && OURS(host, known) -> HOLDS(!whole[host]); forget(host, known, place)
    :: else -> DISPLACE_FOREIGN(host, known, place)
    fi;
    known = 0
}
#ifdef MUTANT_DISPLACE
#define DISPLACE(host, place) skip
#else
#define DISPLACE(host, place) displace(host, place)
#endif

inline publish_page(host, place, page) {
    DISPLACE(host, place);
    DIE;
    if
    :: !failed && INDEX(host, place) == NONE ->
        d_step { place_of[page] = place; state[page] = PUBLISHED };
        DIE;
        atomic { INDEX(host, place) = page; LOG(host, 0, page, place) };
        DIE
    :: else -> failed = 1
    fi
}

#ifdef MUTANT_ORDER
#define EARLIER(host, first, other) publish_page(host, 0, first)
#define LATER(host, first, other) publish_page(host, 1, other)
#else
#define EARLIER(host, first, other) publish_page(host, 1, other)
#define LATER(host, first, other) publish_page(host, 0, first)
#endif
#ifdef MUTANT_SECOND_LOOK
#define SECOND_LOOK(host) found = 0
#else
#define SECOND_LOOK(host) look(host)
#endif

/* Index and free pages as the descriptors say; own pages before the other host's. */
inline rebuild_page(host, page) {
    if
    :: state[page] == PUBLISHED && (INDEX(host, place_of[page]) == NONE ||
           (OURS(host, page) && !OURS(host, INDEX(host, place_of[page])))) ->
        INDEX(host, place_of[page]) = page;
        if
        :: !OURS(host, page) && !HELD(host, page) -> VIEW(host, page) = generation[page]
        :: else
        fi
    :: OURS(host, page) && state[page] == PUBLISHED && INDEX(host, place_of[page]) != page ->
        state[page] = SEALED; settle(host, page)
    :: OURS(host, page) && state[page] != PUBLISHED -> settle(host, page)
    :: else
    fi
}

inline rebuild(host) {
    d_step { INDEX(host, 0) = NONE; INDEX(host, 1) = NONE };
    page = 0;
    do
    :: page < PAGES -> rebuild_page(host, page); page++
    :: else -> break
    od;
    page = 0;
    do /* borrow_recover() */
    :: page < PAGES ->
        if
        :: !OURS(host, page) -> UNPIN(host, page)
        :: else
        fi;
        page++
    :: else -> break
    od;
    page = 0
}
#ifdef MUTANT_REAP
#define REAP(host, page) skip
#else
#define REAP(host, page) drop(host, page)
#endif

inline evict(host, place) {
    lock(host);
    known = INDEX(host, place);
    if
    :: known != NONE && OURS(host, known) -> forget(host, known, place)
    :: else
    fi;
    known = 0;
    unlock(host)
}

proctype publisher(bit host; byte rounds; byte name) {
    byte first = NONE, other = NONE, mine = NONE, mine_first = NONE, number, known, each, before;
    byte seen_page, seen_generation, seen_place, page, gone;
    bit found, seen_free, failed, inside, over;
    do
    :: rounds ->
        rounds--;
        lock(host);
        inside = 1;
        follow(host);
        look(host);
        if
        :: found
        :: else ->
            withdrawn_look(host);
            take(host, mine_first);
            take(host, mine);
            DIE;
            if
            :: mine == NONE && mine_first != NONE -> drop(host, mine_first); mine_first = NONE
            :: else
            fi
        fi;
        unlock(host);
        inside = 0;
        if
        :: mine != NONE ->
            DIE;
            content[mine] = name + rounds;
            content[mine_first] = name + rounds;
            DIE;
            lock(host);
            inside = 1;
            follow(host);
            SECOND_LOOK(host);
            if
            :: !found ->
                EARLIER(host, mine_first, mine);
                HOLDS(failed || INDEX(host, 1) == mine);
                LATER(host, mine_first, mine);
                whole[host] = !failed;
                HOLDS(!failed)
            :: else
            fi;
            drop(host, mine);
            drop(host, mine_first);
            mine = NONE; mine_first = NONE;
            unlock(host);
            inside = 0
        :: else
        fi;
        d_step { first = NONE; other = NONE; found = 0; failed = 0 };
        if
        :: gone = 0
        :: gone = 1
        :: gone = 2
        fi;
        if
        :: gone < 2 -> evict(host, gone)
        :: else
        fi;
        gone = 0
    :: else -> break
    od;
#if KILLS
    goto done;
dead: /* by who locks the host next */
    if
    :: inside -> rebuild(host)
    :: else -> lock(host)
    fi;
    if
    :: mine != NONE -> REAP(host, mine)
    :: else
    fi;
    if
    :: mine_first != NONE -> REAP(host, mine_first)
    :: else
    fi;
    unlock(host);
done:
#endif
    finished++
}

proctype reader(bit host) {
    byte first = NONE, other = NONE, number, known, before;
    byte seen_page, seen_generation, seen_place;
    bit found, seen_free, over;
    lock(host);
    follow(host);
    find(host);
    if
    :: found -> d_step { HELD(host, first)++; HELD(host, other)++; number = content[first] }
    :: else
    fi;
    unlock(host);
    if
    :: found ->
        do
        :: assert(content[first] == number && content[other] == number)
        :: break
        od;
        lock(host);
        drop(host, first);
        drop(host, other);
        unlock(host)
    :: else
    fi;
    finished++
}

/* All is evicted: nothing is left. */
proctype last() {
    byte page, before;
    bit host, over;
    finished == 1 + (ROUNDS0 > 0) + (ROUNDS1 > 0) + TWIN;
    d_step {
        do
        :: page < PAGES ->
            host = page / OWN;
            withdrawn[page] = 0;
            if
            :: state[page] == PUBLISHED ->
                HOLDS(INDEX(host, place_of[page]) == page);
                state[page] = SEALED
            :: else
            fi;
            settle(host, page);
            HOLDS(!pin[page] && is_free[page]);
            page++
        :: else -> break
        od;
        page = 0
    }
}

init {
    atomic {
        byte page;
        do
        :: page < PAGES -> is_free[page] = 1; page++
        :: else -> break
        od;
        INDEX(0, 0) = NONE; INDEX(0, 1) = NONE; INDEX(1, 0) = NONE; INDEX(1, 1) = NONE;
        if :: ROUNDS0 -> run publisher(0, ROUNDS0, 1) :: else fi;
        if :: ROUNDS1 -> run publisher(1, ROUNDS1, 11) :: else fi;
        if :: TWIN -> run publisher(0, 1, 21) :: else fi;
        run reader(1);
        run last()
    }
}
