//! Flags that people bring from llama.cpp, vLLM and mlx-lm: turned into ours where we have the same, passed over with a
//! line on stderr where they change no answer, refused in a sentence where they would. Without this table `-ngl 99`
//! reads as `-n gl`, and `-hf` as a call for help.

use std::ffi::OsString;

/// What becomes of a flag.
#[derive(Clone, Copy, Debug)]
enum Does {
    /// Ours has another name.
    Is(&'static str),
    /// It stands for this flag and its value, and takes none.
    Sets(&'static [&'static str]),
    /// There is nothing to set: why.
    Nothing(&'static str),
    /// It would change the answer, or asks for what is not there: what to do instead.
    Refused(&'static str),
}

/// What stands behind a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Nothing,
    Value,
    /// A value only where the next word is one of these.
    Maybe(&'static [&'static str]),
}

/// Where a flag is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    All,
    Only(&'static [&'static str]),
}

struct Foreign {
    names: &'static [&'static str],
    on: On,
    takes: Takes,
    does: Does,
}

const fn row(names: &'static [&'static str], on: On, takes: Takes, does: Does) -> Foreign {
    Foreign { names, on, takes, does }
}

use Does::{Is, Nothing, Refused, Sets};
use On::{All, Only};
use Takes::{Maybe, Value};

/// Commands that load a model to answer.
const RUNS: On = Only(&["run", "chat", "serve"]);
const SERVE: On = Only(&["serve"]);
const TEXT: On = Only(&["run", "chat"]);
const SWITCH: Takes = Maybe(&["on", "off", "auto", "0", "1", "true", "false"]);

const LAYERS: &str = "all layers run on one backend: choose it with --backend";
const ALWAYS: &str = "it is always on";
const CACHE: &str = "both halves of the cache have one type: --cache-type f16 or f32";
const FETCH: &str = "`moebius pull ORG/REPO:TYPE` fetches a model, and -m ORG/REPO:TYPE runs it";
const EXPERTS: &str = "routed experts stay in host memory as far as the GPU does not hold them: say how much it may hold \
                       with --gpu-memory";
const SPLIT: &str = "a model runs on one device";
const DRAFT: &str = "answers are not drafted by another model";

const TABLE: &[Foreign] = &[
    row(
        &["-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url", "-dr", "--docker-repo"],
        All,
        Value,
        Refused(FETCH),
    ),
    row(&["-ngl", "--n-gpu-layers", "--gpu-layers"], All, Value, Nothing(LAYERS)),
    row(&["-fa", "--flash-attn"], All, SWITCH, Nothing(ALWAYS)),
    row(&["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"], All, Value, Is("--cache-type")),
    row(&["--ctx-size", "--max-model-len", "--max-seq-len"], All, Value, Is("--ctx")),
    row(&["--batch-size"], All, Value, Is("--batch")),
    row(&["-ub", "--ubatch-size"], All, Value, Nothing("a step is as large as --batch says")),
    row(&["-tb", "--threads-batch"], All, Value, Nothing("prompts and answers use the same threads")),
    row(&["--no-mmap"], All, Takes::Nothing, Sets(&["--copy-weights", "all"])),
    row(&["--mlock"], All, Takes::Nothing, Nothing("memory is not locked: see --copy-weights")),
    row(
        &["--no-warmup", "--log-disable", "--no-perf", "--perf", "--prio"],
        All,
        Maybe(&["0", "1", "2", "3"]),
        Nothing("it changes nothing here"),
    ),
    row(&["-ot", "--override-tensor", "--n-cpu-moe", "-ncmoe"], All, Value, Refused(EXPERTS)),
    row(&["-cmoe", "--cpu-moe"], All, Takes::Nothing, Refused(EXPERTS)),
    row(&["-sm", "--split-mode", "-ts", "--tensor-split", "--rpc"], All, Value, Refused(SPLIT)),
    row(&["-mg", "--main-gpu"], All, Value, Is("--device")),
    row(&["-dev"], All, Value, Refused("choose a device by its number in `moebius devices`: --device N")),
    row(&["-md", "--model-draft", "--draft", "--draft-max", "--spec-type"], All, Value, Refused(DRAFT)),
    row(&["--mmproj", "-mm", "--image", "--audio"], All, Value, Refused("models read text only")),
    row(
        &["--lora", "--lora-scaled", "--control-vector"],
        All,
        Value,
        Refused("adapters are not applied: merge them into the model"),
    ),
    row(
        &[
            "--rope-scaling",
            "--rope-scale",
            "--rope-freq-base",
            "--rope-freq-scale",
            "--yarn-orig-ctx",
            "--override-kv",
        ],
        All,
        Value,
        Refused("the model's own numbers are used"),
    ),
    row(&["--predict", "--max-tokens", "--max-new-tokens", "-mt"], TEXT, Value, Is("--n-predict")),
    row(&["-n", "--predict", "--n-predict"], SERVE, Value, Nothing("requests say how many tokens they want")),
    row(&["-sys", "--system-prompt"], TEXT, Value, Is("--system")),
    row(
        &["-st", "--single-turn", "-no-cnv", "--no-conversation"],
        Only(&["run"]),
        Takes::Nothing,
        Nothing("run answers once: see --raw for a text that goes on"),
    ),
    row(
        &["-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"],
        Only(&["chat"]),
        Takes::Nothing,
        Nothing(ALWAYS),
    ),
    row(
        &["-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"],
        Only(&["run"]),
        Takes::Nothing,
        Refused("use `moebius chat`"),
    ),
    row(
        &["--chat-template"],
        RUNS,
        Value,
        Refused("the model's own is used; another one comes from a file, with --chat-template-file FILE"),
    ),
    row(&["--jinja"], RUNS, Takes::Nothing, Nothing(ALWAYS)),
    row(&["--no-jinja"], RUNS, Takes::Nothing, Nothing("the model's template is always used: see --raw")),
    row(
        &["--no-display-prompt", "--simple-io", "-co", "--color"],
        TEXT,
        Takes::Nothing,
        Nothing("it changes nothing here"),
    ),
    row(&["--grammar-file"], Only(&["run"]), Value, Is("--grammar")),
    row(&["-j"], Only(&["run"]), Value, Refused("write the schema into a file, and give --json-schema FILE")),
    row(&["-bf", "--binary-file"], Only(&["run"]), Value, Is("--file")),
    row(&["-np", "--max-num-seqs"], SERVE, Value, Is("--parallel")),
    row(&["-a", "--served-model-name"], SERVE, Value, Is("--alias")),
    row(&["--models-dir"], SERVE, Value, Is("--models")),
    row(
        &[
            "-cb",
            "--cont-batching",
            "--metrics",
            "--slots",
            "--props",
            "--embedding",
            "--embeddings",
            "--webui",
            "--enable-prefix-caching",
        ],
        SERVE,
        Takes::Nothing,
        Nothing(ALWAYS),
    ),
    row(
        &["--no-webui", "--no-slots"],
        SERVE,
        Takes::Nothing,
        Nothing("it stays: put a proxy in front where it should not"),
    ),
    row(
        &["--api-key"],
        SERVE,
        Value,
        Refused(
            "others could see the key in the list of processes: write it into a file, and give --api-key-file FILE",
        ),
    ),
    row(&["--reranking", "--rerank"], SERVE, Takes::Nothing, Nothing("models that rank documents do so at /v1/rerank")),
    row(&["--gpu-memory-utilization", "--tensor-parallel-size", "-tp"], SERVE, Value, Refused(SPLIT)),
    row(
        &["-to", "--timeout", "--threads-http", "-cram", "--cache-ram", "--cache-reuse", "--slot-save-path"],
        SERVE,
        Value,
        Nothing("it changes nothing here"),
    ),
    row(&["-mmp", "--mmap"], Only(&["bench"]), Value, Nothing("see --copy-weights")),
    row(&["-pg"], Only(&["bench"]), Value, Is("--pg")),
];

/// Values that mean "no limit" or "the default", as llama.cpp has them: the flag is then left out.
const UNSET: [(&[&str], &str); 4] = [
    (&["-n", "--n-predict"], "-1"),
    (&["-n", "--n-predict"], "-2"),
    (&["-s", "--seed"], "-1"),
    (&["-c", "--ctx"], "0"),
];
/// Values that ours write differently.
const WRITTEN: [(&str, &str, &str); 2] = [("--top-k", "-1", "0"), ("--repeat-last-n", "-1", "1048576")];

/// The arguments in our words, and what to tell the user about those that fell away.
#[derive(Debug, Default, PartialEq)]
pub struct Translated {
    pub args: Vec<OsString>,
    pub notes: Vec<String>,
}

/// Translates a command line, the program's name first.
///
/// # Errors
/// A sentence about a flag that cannot be honoured.
pub fn translate(args: impl IntoIterator<Item = OsString>) -> Result<Translated, String> {
    let mut args = args.into_iter().peekable();
    let mut out = Translated { args: args.next().into_iter().collect(), notes: Vec::new() };
    let Some(command) = args.next() else { return Ok(out) };
    let name = command.to_string_lossy().into_owned();
    out.args.push(command);
    while let Some(arg) = args.next() {
        // What stands behind `--` is text.
        if arg == "--" {
            out.args.push(arg);
            out.args.extend(args);
            break;
        }
        let whole = arg.to_string_lossy().into_owned();
        let (flag, inline) = match whole.split_once('=') {
            Some((flag, value)) if flag.starts_with('-') => (flag.to_string(), Some(value.to_string())),
            _ => (whole.clone(), None),
        };
        let found = TABLE.iter().find(|row| row.names.contains(&flag.as_str()) && row.on.is(&name));
        let Some(row) = found else {
            // Our own flags, with values as others write them.
            if let Some(value) = inline.clone().or_else(|| Some(args.peek()?.to_string_lossy().into_owned())) {
                let is_unset = UNSET.iter().any(|(flags, unset)| flags.contains(&flag.as_str()) && value == *unset);
                let written = WRITTEN.iter().find(|(known, theirs, _)| *known == flag && *theirs == value);
                if is_unset || written.is_some() {
                    if inline.is_none() {
                        args.next();
                    }
                    if let Some((_, _, ours)) = written {
                        out.args.extend([flag.into(), (*ours).into()]);
                    }
                    continue;
                }
            }
            out.args.push(arg);
            continue;
        };
        let next_is =
            |words: &[&str], next: Option<&OsString>| next.is_some_and(|next| words.iter().any(|w| next == w));
        let value: Option<OsString> = match (row.takes, inline) {
            (_, Some(value)) => Some(value.into()),
            (Value, None) => args.next(),
            (Maybe(words), None) if next_is(words, args.peek()) => args.next(),
            _ => None,
        };
        match row.does {
            Nothing(why) => out.notes.push(format!("{flag} is left out: {why}")),
            Refused(why) => return Err(format!("{flag} cannot be used: {why}")),
            Sets(ours) => out.args.extend(ours.iter().map(OsString::from)),
            Is(ours) => {
                let value = value.ok_or_else(|| format!("{flag} needs a value (here it is {ours})"))?;
                if ours == "--cache-type" {
                    if !["f16", "f32"].iter().any(|kind| value == *kind) {
                        return Err(format!("{flag} {} cannot be used: {CACHE}", value.to_string_lossy()));
                    }
                    // Given once for keys and once for values.
                    if out.args.iter().any(|arg| arg == ours) {
                        continue;
                    }
                }
                let unset = UNSET.iter().any(|(flags, unset)| flags.contains(&ours) && value == *unset);
                if !unset {
                    out.args.extend([ours.into(), value]);
                }
            }
        }
    }
    Ok(out)
}

impl On {
    fn is(self, command: &str) -> bool {
        match self {
            All => !["completions", "devices", "health", "help", "man", "try-grammar"].contains(&command),
            Only(commands) => commands.contains(&command),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn ours(line: &str) -> Result<(String, usize), String> {
        let words = line.split_whitespace().map(OsString::from);
        let Translated { args, notes } = translate(words)?;
        let args: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
        Ok((args.join(" "), notes.len()))
    }

    #[test]
    fn command_lines_of_others_become_ours() {
        for (theirs, expected, n_notes) in [
            ("moebius run hi", "moebius run hi", 0),
            ("moebius run -m x -ngl 99 -fa on --jinja hi", "moebius run -m x hi", 3),
            ("moebius run -fa hi", "moebius run hi", 1),
            ("moebius serve -c 4096 -ngl 99 -fa on --jinja -np 4", "moebius serve -c 4096 --parallel 4", 3),
            ("moebius serve --ctx-size 0 --host 127.0.0.1", "moebius serve --host 127.0.0.1", 0),
            ("moebius run --ctx-size=512 -n -1 --seed -1 --top-k -1 hi", "moebius run --ctx 512 --top-k 0 hi", 0),
            ("moebius run -n 5 --temp 0 hi", "moebius run -n 5 --temp 0 hi", 0),
            ("moebius chat -ctk f16 -ctv f16", "moebius chat --cache-type f16", 0),
            ("moebius run --no-mmap hi", "moebius run --copy-weights all hi", 0),
            ("moebius run -- -ngl 99", "moebius run -- -ngl 99", 0),
            ("moebius chat -cnv", "moebius chat", 1),
            ("moebius", "moebius", 0),
        ] {
            assert_eq!(ours(theirs), Ok((expected.into(), n_notes)), "{theirs}");
        }
        for (theirs, part) in [
            ("moebius run -hf a/b hi", "-hf cannot be used: `moebius pull ORG/REPO:TYPE` fetches"),
            ("moebius serve -md draft.gguf", "-md cannot be used"),
            ("moebius run -ctk q8_0 hi", "-ctk q8_0 cannot be used"),
            ("moebius run -cnv", "use `moebius chat`"),
            ("moebius serve --api-key x", "--api-key-file FILE"),
            ("moebius serve -np", "-np needs a value"),
        ] {
            assert!(ours(theirs).is_err_and(|why| why.contains(part)), "{theirs}: {:?}", ours(theirs));
        }
    }

    /// A row must not hide a flag of ours, and what it becomes must be one.
    #[test]
    fn the_table_agrees_with_our_flags() {
        let cli = Cli::command();
        for command in cli.get_subcommands().filter(|command| !command.is_hide_set()) {
            let all: Vec<String> = command
                .get_arguments()
                .flat_map(|arg| {
                    let longs = arg.get_long_and_visible_aliases().unwrap_or_default();
                    let shorts = arg.get_short().map(|c| format!("-{c}"));
                    longs.into_iter().map(|long| format!("--{long}")).chain(shorts)
                })
                .collect();
            for row in TABLE.iter().filter(|row| row.on.is(command.get_name())) {
                for name in row.names {
                    assert!(!all.iter().any(|own| own == name), "{} {name}", command.get_name());
                }
                let needed = match row.does {
                    Is(name) => Some(name),
                    Sets(words) => words.first().copied(),
                    Nothing(_) | Refused(_) => None,
                };
                let runs = ["run", "chat", "serve"].contains(&command.get_name());
                assert!(!runs || needed.is_none_or(|name| all.iter().any(|own| own == name)), "{needed:?}");
            }
        }
    }
}
