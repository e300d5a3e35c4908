"""`make mutants`: flushes, fences and checks left out in turn: on incoherent memory a seed tells.

    python -m tests.native.mutants BUILD [NAME ...] [--seeds 4000]

BUILD has the programs below and the archive that they are linked with; NAME is a site of
native/src/base/flush.h or a check below. A site is left out by the emulated memory, a check in a
copy of its source. What no seed misses stands in REDUNDANT with the reason, or the run fails; so
does what stands there and is missed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.native import incoherent

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "native/src"
TESTS = ROOT / "tests/native"
PROTOCOL = incoherent.PROGRAMS["protocol"]
# Which file's sites another program is to tell,
PROGRAMS = {f"coherence/{name}.c": incoherent.PROGRAMS[name] for name in ("visibility", "rpc")}
# and what too few seeds of the protocol tell: a test that goes just there.
INTERRUPTED = incoherent.PROGRAMS["hosts"]
ON_REAL_MEMORY = "test_hosts"
DESCRIPTORS = "test_visibility"
PRIVATE_CACHES = "test_objects_incoherent"
STATES = "test_states_incoherent"
UPGRADE = "test_upgrade_incoherent"
FORGOTTEN = "test_forgotten"
TELLS = {
    DESCRIPTORS: "DESCRIPTOR_CRC",
    INTERRUPTED: "FLUSH_NAME FLUSH_NAME_FENCE FLUSH_NAME_LOOK_BEGIN CLAIM_NAME_AGAIN LOG_ORDER",
    ON_REAL_MEMORY: "WAIT_CLOSED LOG_CRC LOG_LATER_CRC LOG_GIVEN_UP LOG_BEHIND_DAMAGE LOG_GAP "
    "LOG_TORN_END CLAIM_ENTRY ATTACH_KEEPS_PINS NAME_TWICE",
    FORGOTTEN: "FORGET_CARRIED FORGET_FOLLOWED FORGET_REBUILT",
    PRIVATE_CACHES: "OBJECT_PUT_BACK OBJECT_PART_BACK OBJECT_PUBLISH_BACK OBJECT_RESTORE_BACK "
    "OBJECT_LOOK OBJECT_ONCE SCRUB_BACK SCRUB_TABLE_BACK UNSEALED",
    STATES: "STATE_BACK STATE_TAIL_LOOK STATE_BORROWED",
    UPGRADE: "UPGRADE_EVICT UPGRADE_ORDER",
}
TOLD_BY = {name: program for program, names in TELLS.items() for name in names.split()}
# What changes nothing that a test on these models could see when it is left out, and why.
BEATS = "V10, V12: who is suspected wrongly is fenced, and comes back; beats are progress"
FENCE_FOLLOWS = "V8, V10: the look that comes next begins with a full fence"
REDUNDANT = {
    "FLUSH_UNPIN_BEGIN_FENCE": (
        "V6: needed where a load may be late, after a younger store is in memory; no load "
        "is late here, docs/models/publish.pml has it"
    ),
    "FLUSH_BEAT": BEATS,
    "FLUSH_BEAT_FENCE": BEATS,
    "FLUSH_BEAT_LOOK_BEGIN": BEATS,
    "FLUSH_BEAT_LOOK": BEATS,
    "FLUSH_BEAT_LOOK_FENCE": BEATS,
    "FLUSH_CLOSE_FENCE": FENCE_FOLLOWS,
    "FLUSH_CLAIM_FENCE": FENCE_FOLLOWS,
    "FLUSH_COMMIT_FENCE": FENCE_FOLLOWS,
    "FLUSH_GIVE_FENCE": FENCE_FOLLOWS,
    "FLUSH_FENCE_LOOK_BEGIN": (
        "V10: a full fence was right before it where it matters: close, commit, claims "
        "looked at, extents taken. An invalidate is not done before an older fence (Intel "
        "SDM vol. 2A, CLFLUSHOPT: ordered with respect to fences; Arm ARM, DSB: nothing that "
        "follows is executed before it completes)"
    ),
    "FLUSH_SLOT_LOOK_BEGIN": (
        "V12: a slot may be read at any time after our own is in memory, which "
        "FLUSH_SLOT_FENCE says; as above"
    ),
    "FLUSH_COMMIT_LOOK_BEGIN": (
        "V10: FLUSH_FENCE_LOOK_FENCE was before the count, FLUSH_CLAIM_FENCE before the "
        "commit; as above"
    ),
    "FLUSH_CLAIM_LOOK_BEGIN": (
        "V12: who acts on claims holds the lock, so none is made between its look at the "
        "commits and this one"
    ),
    "FLUSH_CLAIM_LOOK_FENCE": (
        "V10: the look at the fences, which begins with one, comes before a claim is loaded"
    ),
    "CLAIM_CRC": (
        "V7: a claim is stored in order, its commit in the first word; half written, it "
        "is of a commit that has not come. The CRC is for damage (test_hosts.c)"
    ),
    "CLAIM_COMMIT": (
        "V10, V12: under the lock, a claim without its commit is above its maker's cut, "
        "or was forgotten before the maker left the queue; without the lock it is needed"
    ),
    "CLAIM_EPOCH": ("V12: as above; a host has its name in memory before it has the lock"),
    "NAME_CRC": (
        "V7: of a name that changes, epoch and status are stored last, in one word; the "
        "CRC is for damage (test_hosts.c)"
    ),
}


class Check(NamedTuple):
    """A line of a source, and what stands there without the check."""

    source: str
    text: str
    without: str


CHECKS = {
    "GENERATION": Check(
        "coherence/visibility.c",
        "return version == item->version ? COPYING : -CXLKV_E_STALE;",
        "return COPYING;",
    ),
    "DESCRIPTOR_CRC": Check(
        "coherence/visibility.c",
        "if (crc != crc32c(0, item->descriptor, LINE - sizeof(crc))) return -CXLKV_E_CORRUPT;",
        "(void)crc;",
    ),
    "LOG_CRC": Check(
        "coherence/host_log.c",
        "return record->crc == crc32c(0, record, offsetof(log_record, crc)) &&",
        "return",
    ),
    "LOG_ORDER": Check(
        "coherence/host_log.c",
        "flush_store_line(line, record, 1);",
        "flush_store_word(line, sequence);\n    flush_store_line(line, record, 1);",
    ),
    "LOG_LATER_CRC": Check(
        "coherence/host_log.c",
        "if (!record_is_whole(h, record, sequence)) return -CXLKV_E_CORRUPT;",
        "if (record->sequence == sequence && !record_is_whole(h, record, sequence))\n"
        "        return -CXLKV_E_CORRUPT;",
    ),
    "LOG_GIVEN_UP": Check(
        "coherence/host_log.c",
        "if (count == -CXLKV_E_CORRUPT) place->damaged = records[0];",
        "",
    ),
    "LOG_BEHIND_DAMAGE": Check(
        "coherence/host_log.c", "return code > 0 || code == -CXLKV_E_STALE;", "return code > 9;"
    ),
    "LOG_GAP": Check(
        "coherence/host_log.c",
        "if (record.sequence != s || !record_is_whole(h, &record, s)) fill_log",
        "if (false) fill_log",
    ),
    "LOG_TORN_END": Check(
        "coherence/host_log.c",
        "if (is_blank(&record) || record_is_whole(h, &record, s)) break;",
        "break;",
    ),
    "FORGET_CARRIED": Check("pages/log_writer.c", "    forgotten_carry(pool, count);\n", ""),
    "FORGET_FOLLOWED": Check("sharing/log_reader.c", "        forget_foreign(pool);\n", ""),
    "FORGET_REBUILT": Check(
        "host/rebuild.c", "state == PAGE_PUBLISHED && is_forgotten(pool, &line)", "false"
    ),
    "CLAIM_CRC": Check(
        "coherence/claims.c", "|| c->crc != claim_crc(c, extent) || c->commit", "|| c->commit"
    ),
    "CLAIM_COMMIT": Check("coherence/claims.c", " || c->commit > by->commits) return", ") return"),
    "CLAIM_EPOCH": Check(
        "coherence/claims.c", "if (epoch == 0 || epoch > by->name.epoch) return false;", ""
    ),
    "CLAIM_CUT": Check("coherence/claims.c", "&& c->commit > by->fence.cut);", "&& false);"),
    "CLAIM_ENTRY": Check(
        "coherence/claims.c",
        "return pair->claims[0].version < pair->claims[1].version ? 0 : 1;",
        "return pair->claims[0].version < pair->claims[1].version ? 1 : 0;",
    ),
    "CLAIM_NAME_AGAIN": Check(
        "coherence/claims.c", "while (by->name.epoch != epoch)", "while (false)"
    ),
    "CHECK_BEFORE": Check(
        "coherence/claims.c",
        "if (code < 0 || fence.fenced) return code < 0 ? code : -CXLKV_E_FENCED;",
        "",
    ),
    "CHECK_AFTER": Check(
        "coherence/claims.c",
        "if (code == 0 && fence.fenced && commits > fence.cut) code = -CXLKV_E_FENCED;",
        "",
    ),
    "NAME_CRC": Check(
        "coherence/hosts.c",
        "return name->crc == crc32c(0, name, offsetof(host_name, crc)) &&",
        "return",
    ),
    "NAME_TWICE": Check(
        "coherence/hosts.c",
        "int newest = newest_name(names, host);",
        "int newest = name_is_whole(&names[0], host) - 1;",
    ),
    "ATTACH_CUT": Check(
        "coherence/membership.c",
        "if (fence->fenced && fence->cut < commits) commits = fence->cut;",
        "",
    ),
    "ATTACH_FORGETS": Check("coherence/membership.c", "    hosts_forget_claims(h, commits);\n", ""),
    "ATTACH_KEEPS_PINS": Check(
        "coherence/membership.c", "if (name->nonce != nonce) clear_pins(h);", "clear_pins(h);"
    ),
    "ATTACH_CLEARS_PINS": Check(
        "coherence/membership.c", "if (name->nonce != nonce) clear_pins(h);", ""
    ),
    "RECOVER": Check(
        "coherence/membership.c",
        "void hosts_recover_claims(const hosts *h) {",
        "void hosts_recover_claims(const hosts *h) {\n    if (h) return;",
    ),
    "RECOVER_FENCES": Check(
        "coherence/membership.c",
        "hosts_recover(const hosts *h) {\n    hosts_open_fences(h);",
        "hosts_recover(const hosts *h) {",
    ),
    # Whoever mends after a death with the host lock takes the place in the queue from another
    # process of its host, which is alive.
    "RECOVER_OTHERS": Check(
        "coherence/membership.c",
        "hosts_recover(const hosts *h) {\n    hosts_open_fences(h);",
        "hosts_recover(const hosts *h) {\n    hosts_open_fences(h);\n    hosts_unlock(h);",
    ),
    "RECOVER_CLAIMS": Check(
        "coherence/membership.c",
        "(hosts_forget_claims(h, hosts_commits(h, h->self)), 0)",
        "0",
    ),
    "CLOSE": Check(
        "coherence/fences.c",
        "set_fence(h, host, FENCE_WORD(epoch, FENCE_CLOSED, 0), FLUSH_CLOSE);",
        "",
    ),
    "CUT": Check(
        "coherence/fences.c",
        "fence->cut = min_u64(fence->cut, FENCE_COUNT(word));",
        "fence->cut = FENCE_COUNT(word);",
    ),
    "DEKKER": Check(
        "coherence/fences.c",
        "if (look_fences(h, h->self, h->epoch, &fence) != 0 || fence.fenced)",
        "if (look_fences(h, h->self, h->epoch, &fence) == 1ull << 63)",
    ),
    "WAIT_CLOSED": Check("coherence/fences.c", "waits |= code > 0;", ""),
    "CHOOSING": Check("coherence/hosts_lock.c", "if (SLOT_CHOOSES(word)) return 1;", ""),
    "TIE": Check("coherence/hosts_lock.c", "|| (theirs == ticket && host < h->self)", ""),
    "PINS": Check("protocol_scenario.h", "        if (pinned) continue;\n", ""),
    # Objects: the payload is written back where it did not go past the caches (V1), other hosts'
    # descriptors are read from memory, a page is pinned once, and plain stores to what was never
    # published do not stay behind (V8).
    "OBJECT_PUT_BACK": Check(
        "objects/move.c", "flush_write_back(FLUSH_PUBLISH_HEADER, pool_bytes, bytes)", "(void)0"
    ),
    "OBJECT_PART_BACK": Check(
        "objects/move.c", "!(streams && kernels_current()->streams)", "!kernels_current()->streams"
    ),
    "OBJECT_PUBLISH_BACK": Check(
        "objects/leases.c", "flush_write_back(FLUSH_PUBLISH_HEADER, at, place->bytes)", "(void)0"
    ),
    "OBJECT_RESTORE_BACK": Check(
        "tiers/record_transfer.c", "flush_write_back(FLUSH_PUBLISH_HEADER, to, used)", "(void)0"
    ),
    "OBJECT_LOOK": Check(
        "objects/objects.c",
        "line_drop(FLUSH_ACQUIRE_DESCRIPTOR, descriptor_of(pool, page), pool->mode)",
        "(void)0",
    ),
    "OBJECT_ONCE": Check(
        "objects/objects.c", "i == 0 || foreign[i]->page != foreign[i - 1]->page", "true"
    ),
    "STATE_BACK": Check(
        "prefix/states.c",
        "flush_write_back(FLUSH_PUBLISH_HEADER, piece->at, piece->size)",
        "(void)0",
    ),
    "STATE_TAIL_LOOK": Check(
        "prefix/boundary.c",
        "if (!page_is_ours(pool, page)) descriptor_drop(pool, page);",
        "",
    ),
    "STATE_BORROWED": Check(
        "prefix/boundary.c", "(!pool->shared || found_borrow(pool, s->f, prefix))", "true"
    ),
    "SCRUB_BACK": Check(
        "pages/pages.c", "flush_write_back(FLUSH_PUBLISH_HEADER, pieces, bytes)", "(void)0"
    ),
    "SCRUB_TABLE_BACK": Check(
        "format/records.c",
        "flush_write_back(FLUSH_PUBLISH_HEADER, checksum_table(pool, page), g->checksum_bytes)",
        "(void)0",
    ),
    "UNSEALED": Check(
        "pages/pages.c",
        "FOR_BITS(pages, i) clean_unsealed",
        "FOR_BITS(0 * pages, i) clean_unsealed",
    ),
    # An upgrade's fields are in memory before its version.
    "UPGRADE_EVICT": Check(
        "format/superblock.c", "if (flush_supported()) flush_evict(FLUSH_NONE, to, bytes);", ""
    ),
    "UPGRADE_ORDER": Check(
        "format/superblock.c",
        "    upgrade_store(line, &made.crc_before, LINE_BYTES, base);\n",
        "    upgrade_store(base + 8, &made.version, sizeof(uint64_t), base);\n"
        "    upgrade_store(line, &made.crc_before, LINE_BYTES, base);\n",
    ),
}


# Found late.
LATE = ("CUT", "FLUSH_CLOSE")
SEEDS = dict.fromkeys(LATE, 24_000)


def line_that_fails(program: Path) -> list[str]:
    """Line at which a test without seeds fails; none when it passes."""
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    line = re.search(r"\w+\.[ch]:\d+", done.stderr)
    if line is None:
        raise SystemExit(f"{program} failed otherwise:\n{done.stderr[-2000:]}")
    return [line[0]]


def programs_of(name: str) -> list[str]:
    """The tests that must notice a missing site; none is left out for all."""
    used = [
        program
        for source, program in PROGRAMS.items()
        if re.search(rf"\b{name}\b", (SOURCES / source).read_text())
    ]
    everybody = [*PROGRAMS.values(), INTERRUPTED, PROTOCOL]
    return everybody if name == "FLUSH_NONE" else used or [TOLD_BY.get(name, PROTOCOL)]


def build_without(name: str, build: Path, folder: Path) -> Path:
    """The program that is to tell, with one check left out of a copy of its source."""
    check, program = CHECKS[name], TOLD_BY.get(name, PROTOCOL)
    for path in TESTS.rglob("*.[ch]"):
        shutil.copy(path, folder)
    origin = (TESTS / "support" if check.source.endswith(".h") else SOURCES) / check.source
    text = origin.read_text()
    if text.count(check.text) != 1:
        raise SystemExit(f"{name}: not once in {check.source}: {check.text}")
    changed = folder / origin.name
    changed.write_text(text.replace(check.text, check.without))
    sources = [folder / f"{program}.c"]
    if program in (ON_REAL_MEMORY, DESCRIPTORS, FORGOTTEN):
        sources.append(SOURCES / "base/flush.c")
    if check.source.endswith(".c"):
        sources.append(changed)
    includes = [f"-I{ROOT / 'native' / part}" for part in ("include", "src", "emulation", "")]
    # The level that the archive has: a copy that lacks a function would bring in the original.
    command = [os.environ.get("CC", "cc"), "-std=c11", "-O2", "-D_GNU_SOURCE", "-DCXLKV_DEBUG=2"]
    command += ["-DCXLKV_BUILD=1"]  # the version, which these programs only hand on
    libraries = [str(build / f"libcxlkv_incoherent{part}.a") for part in ("_pool", "")]
    command += [*includes, *map(str, sources), *libraries, "-lm"]
    subprocess.run([*command, "-pthread", "-o", str(folder / program)], check=True)
    return folder / program


def missed_by(name: str, build: Path, seeds: int) -> list[str]:
    """Where it is missed: a program, a model and the seed, or the line of a test without one."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        programs = [build / program for program in programs_of(name)]
        if name in CHECKS:
            programs = [build_without(name, build, Path(folder))]
        for program in programs:
            if program.name in TELLS and program.name != INTERRUPTED:
                found += line_that_fails(program)
                continue
            for model in incoherent.MODELS:
                if not found or name == "FLUSH_NONE":
                    site = None if name in CHECKS else name
                    seed = incoherent.run(program, 1, seeds, model, site).failed_seed
                    found += [f"{program.name}, {model}, seed {seed}"] if seed else []
    return found


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("build", type=Path)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--seeds", type=int, default=4000)
    given = arguments.parse_args()
    wrong = 0
    for name in [*incoherent.sites(), *CHECKS]:
        if given.names and name not in given.names:
            continue
        began = time.monotonic()
        seeds = given.seeds // 4 if name in REDUNDANT else SEEDS.get(name, given.seeds)
        found = missed_by(name, given.build.resolve(), seeds)
        reason = "nothing is left out" if name == "FLUSH_NONE" else REDUNDANT.get(name, "")
        fine = bool(found) != bool(reason)
        wrong += not fine
        verdict = "; ".join(found) or reason or "no seed fails"
        print(f"{'' if fine else 'WRONG '}{name}: {verdict} ({time.monotonic() - began:.1f} s)")
        sys.stdout.flush()
    print(f"{wrong} of these are not as they should be" if wrong else "all as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
