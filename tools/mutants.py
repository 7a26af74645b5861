#!/usr/bin/env python3
"""Takes the bounds away that SECURITY.md promises, and looks whether their tests notice.

    tools/mutants.py FOLDER [ROUND]

FOLDER is a clean worktree of its own (`git worktree add --detach FOLDER`): its sources are changed, built and put
back. Each mutant is an edit that removes one bound, and the tests that must fail with it. The mutants of a round touch
different tests and are built together. A test that hangs, or takes more than 3 GB, has failed too: without its bound
that is what is to be expected. Ends with 1 when a test passed without its bound, or fails with it.
"""
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

SECONDS = 150
BYTES = 3 << 30


@dataclasses.dataclass
class Mutant:
    what: str
    path: str
    old: str
    new: str
    tests: list  # of (package, target, test)


# Packages and targets of tests.
ENGINE, HOSTILE = ("moebius-engine", "engine"), ("moebius-engine", "hostile_templates")
LATE, FILES = ("moebius-engine", "late"), ("moebius-engine", "tokenizer_json")
LIB, PROGRAM, SERVER = ("moebius", "moebius"), ("moebius", "cli"), ("moebius", "serve")
RULES = "crates/engine/src/grammar/"
TOKENS = "crates/engine/src/tokenizer/"
SERVE = "crates/moebius/src/serve/"
OUT = "crates/moebius/src/out.rs"


def mutant(what, path, old, new, *tests):
    return Mutant(what, path, old, new, [(*where, name) for where, name in tests])


ROUNDS = [
    [
        mutant(
            "expressions that hold at once",
            RULES + "extent.rs",
            "if width > MAX_RULE_MEETS {",
            "if width > usize::MAX - MAX_RULE_MEETS {",
            (ENGINE, "what_multiplies_is_refused_by_name"),
        ),
        mutant(
            "what a trial of a grammar may take",
            "crates/moebius/src/trial.rs",
            "    limit().context(",
            "    let _ = limit; Ok::<(), std::io::Error>(()).context(",
            (PROGRAM, "costly_grammars_are_ended"),
        ),
        mutant(
            "what a template reads",
            "crates/engine/src/template/bounds.rs",
            ".checked_sub(touched)",
            ".checked_sub(touched.min(1))",
            (HOSTILE, "operations_on_values_stay_within_the_limits"),
        ),
        mutant(
            "what a template holds, as the allocator counts it",
            "crates/sys/src/meter.rs",
            "    HELD.get() > LIMIT.get()",
            "    HELD.get() > LIMIT.get().saturating_mul(1000)",
            (("moebius-engine", "metered_templates"), "what_nobody_pays_for_ends_too"),
        ),
        mutant(
            "growth of normalizers",
            TOKENS + "normalize.rs",
            "match growth > MAX_GROWTH || before > MAX_BEFORE {",
            "match growth > f64::MAX || before > f64::MAX {",
            (FILES, "files_that_cost_too_much_are_refused"),
        ),
        mutant(
            "bytes read beyond matches",
            TOKENS + "stepper.rs",
            "(i - settled >= LOOKAHEAD && i - settled >= self.allowance)",
            "(i - settled >= LOOKAHEAD && i - settled >= self.allowance && i == usize::MAX)",
            (ENGINE, "what_is_read_is_linear_in_the_text"),
        ),
        mutant(
            "size of a compiled pattern",
            TOKENS + "stepper.rs",
            "const MAX_COMPILED: usize = 2 << 20;",
            "const MAX_COMPILED: usize = 1 << 30;",
            (ENGINE, "large_patterns_are_refused"),
        ),
        mutant(
            "length of special tokens",
            TOKENS + "special.rs",
            "find(|s| s.text.len() > MAX_BYTES)",
            "find(|s| s.text.len() > 100_000 * MAX_BYTES)",
            (ENGINE, "many_and_long_strings_are_found_in_one_pass"),
        ),
        mutant(
            "length of SentencePiece's tokens",
            TOKENS + "spm.rs",
            "false if text.len() > MAX_TOKEN =>",
            "false if text.len() > 1000 * MAX_TOKEN =>",
            (("moebius-engine", "tokenizer"), "tokens_that_join_too_often_are_refused"),
        ),
        mutant(
            "what grammars cost while tokens are chosen",
            RULES + "guard.rs",
            "match is_late || self.taking.sum > TAKING + TAKING_PER_TOKEN * n {",
            "match is_late && self.taking.sum > 1000 * TAKING + TAKING_PER_TOKEN * n {",
            (ENGINE, "ambiguous_grammars_are_ended"),
        ),
        mutant(
            "values in a body",
            SERVE + "body.rs",
            "if self.n_values > MAX_VALUES {",
            "if self.n_values > 1000 * MAX_VALUES {",
            (LIB, "values_are_skipped_or_counted"),
        ),
        mutant(
            "the body is dropped before the answer",
            SERVE + "generate.rs",
            "        room.hold(n_tokens * n * size_of::<u32>())?;",
            "        room.hold(n_tokens)?; room.hold(4 << 20)?;",
            (LIB, "a_body_is_gone_before_its_answer_comes"),
        ),
        mutant(
            "freed memory goes back",
            "crates/sys/src/heap.rs",
            "        libc::malloc_trim(0);",
            "",
            (SERVER, "memory_is_bounded_and_given_back"),
        ),
        mutant(
            "lines of the log that cannot be written",
            SERVE + "log.rs",
            "let _ = self.log.lines.try_send(Message::Line(line.into_bytes()));",
            "let _ = MAX_WAITING; use std::io::Write; std::io::stderr().write_all(line.as_bytes()).unwrap();",
            (SERVER, "a_full_or_stuck_log_holds_up_nobody"),
        ),
        mutant(
            "time for a body",
            SERVE + "body.rs",
            "let due = start + BODY_TIME +",
            "let due = start + 100 * BODY_TIME +",
            (SERVER, "slow_bodies_hold_no_room"),
        ),
        mutant(
            "bytes of log-probabilities",
            SERVE + "generate.rs",
            "if bytes > MAX_NUMBERS_BYTES {",
            "if bytes > 1000 * MAX_NUMBERS_BYTES {",
            (SERVER, "numbers_without_end_are_refused"),
        ),
        mutant(
            "answers that wait to be read",
            SERVE + "routes.rs",
            "match room.hold(usize::try_from(n_bytes)",
            "match room.hold(usize::try_from(n_bytes.min(1))",
            (LIB, "answers_that_wait_to_be_read_are_counted"),
        ),
        mutant(
            "text of files on terminals",
            "crates/checkpoint/src/error.rs",
            "            ' '..='~' => out.push(c),",
            "            ' '..='~' | '\\u{1b}' | '\\u{202e}' => out.push(c),",
            (PROGRAM, "nothing_out_of_a_file_is_hidden"),
            (("moebius-checkpoint", "checkpoint"), "nothing_is_hidden"),
        ),
        mutant(
            "devices and links are written in place",
            OUT,
            "Ok(found) if !found.is_file() => {",
            "Ok(found) if false && !found.is_file() => {",
            (PROGRAM, "output_files_are_what_the_user_made_them"),
        ),
        mutant(
            "closed streams are no panic",
            OUT,
            "Ok(text.split('\\n').try_for_each(|line| writeln!(out, \"{}\", visible(line)))?)",
            "Ok(text.split('\\n').for_each(|line| writeln!(out, \"{}\", visible(line)).unwrap()))",
            (PROGRAM, "closed_and_full_streams_end_in_order"),
        ),
        mutant(
            "hosts of other names",
            SERVE + "guard.rs",
            "if !self.serves(name) {",
            "if !self.serves(name) && name.is_empty() {",
            (LIB, "only_our_own_pages_and_names_get_in"),
        ),
        mutant(
            "a mapped file that is cut",
            "crates/checkpoint/src/fault.rs",
            "match unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } {",
            "match unsafe { libc::sigaction(libc::SIGUSR2, &action, ptr::null_mut()) } {",
            (("conformance", "lost_file"), "a_step_over_a_cut_file_fails_and_names_it"),
        ),
        mutant(
            "length of texts",
            "crates/moebius/src/input.rs",
            "const MAX_TEXT_BYTES: u64 = 64 << 20;",
            "const MAX_TEXT_BYTES: u64 = 1 << 40;",
            (PROGRAM, "texts_are_read_within_bounds"),
        ),
        mutant(
            "variables that the server sets",
            SERVE + "conversation.rs",
            "match SET.iter().find(|name| kwargs.contains_key(**name)) {",
            "match SET.iter().find(|name| kwargs.contains_key(**name) && name.is_empty()) {",
            (LIB, "what_is_wrong_is_named"),
        ),
        mutant(
            "clients that have said all",
            SERVE + "http.rs",
            "    http.half_close(true);",
            "",
            (SERVER, "a_client_that_has_said_all_gets_its_answer"),
        ),
        mutant(
            "one field of a name in a head",
            SERVE + "guard.rs",
            "    if values.next().is_some() {\n",
            "    if values.next().is_some() && name.as_str().is_empty() {\n",
            (SERVER, "heads_must_be_clear_and_ours"),
        ),
        mutant(
            "idle connections make room",
            SERVE + "http.rs",
            "            line.close.notify_one();",
            "            let _ = line;",
            (SERVER, "idle_connections_make_room"),
        ),
        mutant(
            "characters of the log that act",
            SERVE + "log.rs",
            "let plain = matches!(c, '\"' | '\\'' | '\\\\')",
            "let plain = matches!(c, '\"' | '\\'' | '\\\\' | '\\u{202e}')",
            (SERVER, "the_log_says_why_and_cannot_be_dressed_up"),
        ),
        mutant(
            "marks at the start of a file of keys",
            SERVE + "app.rs",
            "text.strip_prefix('\\u{feff}').unwrap_or(text)",
            "text.strip_prefix('\\u{fffe}').unwrap_or(text)",
            (LIB, "keys_open_and_nothing_else_does"),
        ),
    ],
    [
        mutant(
            "multiples of a schema",
            RULES + "extent.rs",
            "match sum > MAX_RULE_MULTIPLE {",
            "match sum > f64::MAX {",
            (ENGINE, "what_multiplies_is_refused_by_name"),
        ),
        mutant(
            "what a template builds",
            "crates/engine/src/template/bounds.rs",
            ".checked_sub(built)",
            ".checked_sub(built.min(1))",
            (HOSTILE, "operations_on_values_stay_within_the_limits"),
        ),
        mutant(
            "patterns of a tokenizer.json",
            TOKENS + "json/steps.rs",
            "match n > MAX_PATTERNS {",
            "match n > 1000 * MAX_PATTERNS {",
            (FILES, "files_that_cost_too_much_are_refused"),
        ),
        mutant(
            "a late mask holds up nobody",
            "crates/engine/src/scheduler/mod.rs",
            "let mut patience = PATIENCE;",
            "let mut patience = 1000 * PATIENCE;",
            (LATE, "others_go_on_while_one_is_late"),
        ),
        mutant(
            "one mask that never comes",
            RULES + "guard.rs",
            "let longest = match progress.took() > MAX_MASK {",
            "let longest = match progress.took() > 1000 * MAX_MASK {",
            (LATE, "what_comes_too_late_ends"),
        ),
        mutant(
            "room for what has arrived",
            SERVE + "body.rs",
            "let capacity = (2 * len).min(length.unwrap_or(MAX_BODY_BYTES)).max(len);",
            "let capacity = length.unwrap_or(MAX_BODY_BYTES).max(len);",
            (SERVER, "slow_bodies_hold_no_room"),
        ),
        mutant(
            "ids in a list",
            SERVE + "body.rs",
            "if self.ids.len() == MAX_IDS {",
            "if self.ids.len() == 100 * MAX_IDS {",
            (LIB, "what_is_not_known_costs_nothing_and_what_is_known_is_counted"),
        ),
        mutant(
            "pages of other sites",
            SERVE + "guard.rs",
            "Some(allowed) if !ours &&",
            "Some(allowed) if ours && !ours &&",
            (LIB, "only_our_own_pages_and_names_get_in"),
        ),
        mutant(
            "codings of a body",
            SERVE + "guard.rs",
            "if codings.next().is_some_and(|coding| !coding",
            "if codings.next().is_some_and(|coding| coding.is_empty() && !coding",
            (SERVER, "heads_must_be_clear_and_ours"),
        ),
        mutant(
            "ids past the vocabulary",
            SERVE + "text.rs",
            "let Some(bytes) = app.tokenizer.token_bytes(id) else {\n            let n_vocab",
            "let Some(bytes) = app.tokenizer.token_bytes(id).or(Some(&b\"\"[..])) else {\n            let n_vocab",
            (LIB, "what_is_wrong_is_named"),
        ),
        mutant(
            "links are followed",
            OUT,
            "fs::canonicalize(path).and_then(|path| replace(&path,",
            "Ok::<_, io::Error>(path.to_path_buf()).and_then(|path| replace(&path,",
            (PROGRAM, "output_files_are_what_the_user_made_them"),
        ),
        mutant(
            "length of methods",
            SERVE + "guard.rs",
            "if head.method.as_str().len() > MAX_METHOD_BYTES {",
            "if head.method.as_str().len() > 100_000 * MAX_METHOD_BYTES {",
            (LIB, "only_our_own_pages_and_names_get_in"),
        ),
    ],
]


def run(folder, args):
    """What a command writes to stdout; a failure ends the program with the command's own words."""
    done = subprocess.run(args, cwd=folder, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: {done.stderr[-4000:]}")
    return done.stdout


def build(folder):
    """Builds all tests; the executables by package and target."""
    names = ("moebius-checkpoint", "moebius-engine", "moebius-sys", "moebius", "conformance")
    packages = [word for name in names for word in ("-p", name)]
    out = run(folder, ["cargo", "test", "--no-run", "--locked", "--message-format=json", *packages])
    found = {}
    for line in out.splitlines():
        message = json.loads(line)
        # A program may have its library's name, and no tests.
        is_test = message.get("reason") == "compiler-artifact" and message["profile"]["test"] and message["executable"]
        if is_test and message["target"]["kind"] != ["bin"]:
            crate = pathlib.Path(message["manifest_path"]).parent.name
            found[crate, message["target"]["name"]] = message["executable"]
    return found


def resident(group):
    """Bytes of all processes of a process group."""
    total = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
            total += int(fields[21]) * 4096 if int(fields[2]) == group else 0
        except (OSError, IndexError):
            continue
    return total


def outcome(folder, executables, package, target, test):
    """What becomes of a test: "passed", or why it failed."""
    crate = package.removeprefix("moebius-")
    program = executables[crate, target]
    child = subprocess.Popen([program, test], cwd=f"{folder}/crates/{crate}", start_new_session=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    begin, why = time.monotonic(), None
    while child.poll() is None and why is None:
        time.sleep(0.2)
        if resident(child.pid) > BYTES:
            why = f"more than {BYTES >> 30} GB"
        elif time.monotonic() - begin > SECONDS:
            why = f"more than {SECONDS} s"
    if why is not None:
        os.killpg(child.pid, signal.SIGKILL)
        return why
    text = child.stdout.read()
    if "running 0 tests" in text:
        sys.exit(f"there is no test {test} in {program}")
    if child.returncode == 0:
        return "passed"
    said = [line for line in text.splitlines() if "panicked" in line]
    return f"failed: {said[0][-100:]}" if said else f"ended with {child.returncode}"


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    rounds = ROUNDS if len(sys.argv) < 3 else [ROUNDS[int(sys.argv[2]) - 1]]
    if folder == pathlib.Path(__file__).resolve().parents[1] or run(folder, ["git", "status", "--porcelain", "-uno"]):
        sys.exit("FOLDER must be a clean worktree of its own")
    bad = 0
    for mutants in rounds:
        for m in mutants:
            text = (folder / m.path).read_text()
            if text.count(m.old) != 1:
                sys.exit(f"{m.path}: {text.count(m.old)} times {m.old!r}")
            (folder / m.path).write_text(text.replace(m.old, m.new))
        try:
            executables = build(folder)
            for m in mutants:
                for test in m.tests:
                    result = outcome(folder, executables, *test)
                    bad += result == "passed"
                    print(f"{'MISSED' if result == 'passed' else 'noticed':8}{m.what}: {test[2]}: {result}", flush=True)
        finally:
            run(folder, ["git", "checkout", "--quiet", "."])
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
