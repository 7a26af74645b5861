//! Common flags of llama.cpp's programs: turned into ours where we have the same, ignored with a line on stderr where
//! they change no answer, refused in a sentence where they would. Without this table `-ngl 99` reads as `-n gl`, and
//! `-hf` as a call for help. Other foreign flags get clap's message.

use std::ffi::OsString;

use backend::CacheType;

/// What becomes of a flag.
#[derive(Clone, Copy, Debug)]
enum Does {
    /// Ours has another name.
    Is(&'static str),
    /// It stands for these words, followed by its value if it takes one.
    Sets(&'static [&'static str]),
    /// There is nothing to set: why.
    Nothing(&'static str),
    /// It would change the answer, or asks for what is not there: what to do instead.
    Refused(&'static str),
}

/// What follows a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Nothing,
    Value,
    /// A value only where the next word is one of these.
    Maybe(&'static [&'static str]),
}

/// A flag's names, the commands that know it (none: all that load a model), what follows it and what becomes of it.
struct Foreign(&'static [&'static str], &'static [&'static str], Takes, Does);

use Does::{Is, Nothing, Refused, Sets};
use Takes::{Maybe, Value};

const SERVE: &[&str] = &["serve"];
const TEXT: &[&str] = &["run", "chat"];
const LOADS: &[&str] =
    &["run", "chat", "serve", "bench", "plan", "perplexity", "inspect", "logits", "tokenize", "render", "imatrix"];
const RUNS: &[&str] = &["run", "chat", "serve"];
const SWITCH: Takes = Maybe(&["on", "off", "auto", "0", "1", "true", "false"]);

const ALWAYS: &str = "it is always on";
const NO_CHANGE: &str = "it changes nothing here";
const EXPERTS: &str = "the GPU holds as many routed experts as --gpu-memory allows, and host memory the others";
const KEY: &str = "the process list would show the key: put it in a file, --api-key-file FILE";
const TEMPLATE: &str = "the model's own is used; another one comes from a file: --chat-template-file FILE";

#[rustfmt::skip]
const TABLE: &[Foreign] = &[
    Foreign(&["-hf", "-hfr", "--hf-repo"], LOADS, Value, Sets(&["--pull", "--model"])),
    Foreign(&["-ngl", "--n-gpu-layers", "--gpu-layers"], &[], Value,
        Nothing("all layers run on one backend (--backend chooses it)")),
    Foreign(&["-fa", "--flash-attn"], &[], SWITCH, Nothing(ALWAYS)),
    Foreign(&["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"], &[], Value, Is("--cache-type")),
    Foreign(&["--ctx-size", "--max-model-len"], &[], Value, Is("--ctx")),
    Foreign(&["--batch-size"], &[], Value, Is("--batch")),
    Foreign(&["-ub", "--ubatch-size"], &[], Value, Nothing("a step is as large as --batch says")),
    Foreign(&["-tb", "--threads-batch"], &[], Value, Nothing("prompts and answers use the same threads")),
    Foreign(&["--no-mmap"], &[], Takes::Nothing, Sets(&["--copy-weights", "all"])),
    Foreign(&["--mlock"], &[], Takes::Nothing, Nothing("memory is not locked: see --copy-weights")),
    Foreign(&["--no-warmup", "--log-disable", "--no-perf"], &[], Takes::Nothing, Nothing(NO_CHANGE)),
    Foreign(&["-ot", "--override-tensor", "--n-cpu-moe", "-ncmoe"], &[], Value, Refused(EXPERTS)),
    Foreign(&["-cmoe", "--cpu-moe"], &[], Takes::Nothing, Refused(EXPERTS)),
    Foreign(&["-sm", "--split-mode", "-ts", "--tensor-split"], &[], Value, Refused("a model runs on one device")),
    Foreign(&["-mg", "--main-gpu"], &[], Value, Is("--device")),
    Foreign(&["-md", "--model-draft", "-hfd", "-hfrd", "--hf-repo-draft"], RUNS, Value, Is("--draft")),
    Foreign(&["--draft-max", "--draft-n"], RUNS, Value, Is("--draft-tokens")),
    Foreign(&["-mm"], &["run", "chat", "serve"], Value, Is("--mmproj")),
    Foreign(&["--image"], &["chat"], Value, Refused("`/image FILE` shows an image in a conversation")),
    Foreign(&["--lora"], &[], Value, Refused("adapters are not applied: merge them into the model")),
    Foreign(&["--predict", "--max-tokens"], TEXT, Value, Is("--n-predict")),
    Foreign(&["-n", "--predict", "--n-predict"], SERVE, Value, Nothing("requests say how many tokens they want")),
    Foreign(&["-sys", "--system-prompt"], TEXT, Value, Is("--system")),
    Foreign(&["-st", "--single-turn", "-no-cnv", "--no-conversation"], &["run"], Takes::Nothing,
        Nothing("run answers once; --raw continues a text without the chat template")),
    Foreign(&["-cnv", "--conversation", "-i", "--interactive"], &["chat"], Takes::Nothing, Nothing(ALWAYS)),
    Foreign(&["-cnv", "--conversation", "-i", "--interactive"], &["run"], Takes::Nothing,
        Refused("use `moebius chat`")),
    Foreign(&["--chat-template"], RUNS, Value, Refused(TEMPLATE)),
    Foreign(&["--jinja"], RUNS, Takes::Nothing, Nothing(ALWAYS)),
    Foreign(&["--reasoning-budget"], RUNS, Value, Is("--think-budget")),
    Foreign(&["--reasoning-format"], RUNS, Value, Nothing("thoughts are told apart from answers")),
    Foreign(&["--context-shift"], SERVE, Takes::Nothing, Sets(&["--on-full", "trim"])),
    Foreign(&["--context-shift"], TEXT, Takes::Nothing, Nothing("an answer ends where the context does")),
    Foreign(&["--no-context-shift"], &[], Takes::Nothing, Nothing(ALWAYS)),
    Foreign(&["--ctx-checkpoints", "--swa-checkpoints", "--cache-ram", "-cram"], RUNS, Value,
        Nothing("memory bounds them: --memory")),
    Foreign(&["--models-max"], SERVE, Value, Nothing("as many models are loaded as --memory holds")),
    Foreign(&["-j"], &["run"], Value, Is("--json-schema")),
    Foreign(&["--grammar-file"], &["run"], Value, Is("--grammar")),
    Foreign(&["-jf", "--json-schema-file"], &["run"], Value, Is("--json-schema")),
    Foreign(&["-np"], SERVE, Value, Is("--parallel")),
    Foreign(&["-a", "--served-model-name"], SERVE, Value, Is("--alias")),
    Foreign(&["--models-dir"], SERVE, Value, Is("--models")),
    Foreign(&["-cb", "--cont-batching", "--metrics", "--embedding", "--embeddings"], SERVE, Takes::Nothing,
        Nothing(ALWAYS)),
    Foreign(&["--reranking", "--rerank"], SERVE, Takes::Nothing,
        Nothing("models that rank documents do so at /v1/rerank")),
    Foreign(&["--slots"], SERVE, Takes::Nothing, Nothing("/health and /metrics tell what the server does")),
    Foreign(&["--slot-save-path"], SERVE, Value, Refused("--cache-dir FOLDER keeps prompt caches over restarts")),
    Foreign(&["-to", "--timeout"], SERVE, Value,
        Nothing("an answer ends when its client leaves; --drain-seconds bounds the end of the server")),
    Foreign(&["--api-key"], SERVE, Value, Refused(KEY)),
    Foreign(&["--ssl-key-file", "--ssl-cert-file"], SERVE, Value,
        Refused("put a proxy with TLS in front of the server (contrib/ has nginx's and Caddy's files)")),
    Foreign(&["-mmp", "--mmap"], &["bench"], Value, Nothing("see --copy-weights")),
    Foreign(&["-pg"], &["bench"], Value, Is("--pg")),
];

/// Values that mean "no limit" or "the default", as llama.cpp has them: the flag is then left out.
const UNSET: [(&[&str], &str); 5] = [
    (&["--think-budget"], "-1"),
    (&["-n", "--n-predict"], "-1"),
    (&["-n", "--n-predict"], "-2"),
    (&["-s", "--seed"], "-1"),
    (&["-c", "--ctx"], "0"),
];

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
    // Others have a flag for keys and one for values.
    let mut cache: Option<CacheType> = None;
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
        let found = TABLE.iter().find(|row| row.0.contains(&flag.as_str()) && row.is_known_to(&name));
        let Some(&Foreign(_, _, takes, does)) = found else {
            // Our own flags, with values as others write them.
            let value = inline.clone().or_else(|| Some(args.peek()?.to_string_lossy().into_owned()));
            let is_unset =
                |(flags, unset): &(&[&str], &str)| flags.contains(&flag.as_str()) && value.as_deref() == Some(*unset);
            if UNSET.iter().any(is_unset) {
                if inline.is_none() {
                    args.next();
                }
                continue;
            }
            out.args.push(arg);
            continue;
        };
        let next_is =
            |words: &[&str], next: Option<&OsString>| next.is_some_and(|next| words.iter().any(|w| next == w));
        let value: Option<OsString> = match (takes, inline) {
            (_, Some(value)) => Some(value.into()),
            (Value, None) => args.next(),
            (Maybe(words), None) if next_is(words, args.peek()) => args.next(),
            _ => None,
        };
        match does {
            Nothing(why) => out.notes.push(format!("ignoring {flag}: {why}")),
            Refused(why) => return Err(format!("{flag} is not supported: {why}")),
            Sets(ours) => out.args.extend(ours.iter().map(OsString::from).chain(value)),
            Is(ours) => {
                let value = value.ok_or_else(|| format!("{flag} requires a value (here it is {ours})"))?;
                if ours == "--cache-type" {
                    let of = |why| format!("{flag} is not supported: {why}");
                    let cache = cache.get_or_insert_with(CacheType::default);
                    let half = if flag.ends_with('v') { &mut cache.v } else { &mut cache.k };
                    *half = value.to_string_lossy().parse().map_err(of)?;
                    continue;
                }
                let unset = UNSET.iter().any(|(flags, unset)| flags.contains(&ours) && value == *unset);
                if !unset {
                    out.args.extend([ours.into(), value]);
                }
            }
        }
    }
    if let Some(cache) = cache {
        out.args.splice(2..2, ["--cache-type".into(), cache.to_string().into()]);
    }
    Ok(out)
}

impl Foreign {
    fn is_known_to(&self, command: &str) -> bool {
        match self.1 {
            [] => !["completions", "devices", "health", "help", "man", "try-grammar"].contains(&command),
            commands => commands.contains(&command),
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
            ("moebius run --ctx-size=512 -n -1 --seed -1 --top-k -1 hi", "moebius run --ctx 512 --top-k -1 hi", 0),
            ("moebius run -n 5 --temp 0 hi", "moebius run -n 5 --temp 0 hi", 0),
            ("moebius chat -ctk f16 -ctv f16", "moebius chat --cache-type f16", 0),
            ("moebius run -ctk q8_0 -ctv q8_0 -- -ctk f16", "moebius run --cache-type q8_0 -- -ctk f16", 0),
            ("moebius serve --cache-type-v=q8_0 -c 9", "moebius serve --cache-type k=f16,v=q8_0 -c 9", 0),
            ("moebius run --no-mmap hi", "moebius run --copy-weights all hi", 0),
            ("moebius run -- -ngl 99", "moebius run -- -ngl 99", 0),
            ("moebius run -hf a/b:Q4_0 hi", "moebius run --pull --model a/b:Q4_0 hi", 0),
            ("moebius serve -hf a/b", "moebius serve --pull --model a/b", 0),
            ("moebius bench --hf-repo=a/b -p 9", "moebius bench --pull --model a/b -p 9", 0),
            ("moebius serve -md small.gguf --draft-max 4", "moebius serve --draft small.gguf --draft-tokens 4", 0),
            ("moebius run -j {} hi", "moebius run --json-schema {} hi", 0),
            ("moebius serve --timeout 600", "moebius serve", 1),
            ("moebius serve --reasoning-budget 0 --context-shift", "moebius serve --think-budget 0 --on-full trim", 0),
            ("moebius chat --reasoning-budget -1 --no-context-shift", "moebius chat", 1),
            ("moebius serve --models-max 3 --ctx-checkpoints 4 --reasoning-format auto", "moebius serve", 3),
            ("moebius chat -cnv", "moebius chat", 1),
            ("moebius", "moebius", 0),
        ] {
            assert_eq!(ours(theirs), Ok((expected.into(), n_notes)), "{theirs}");
        }
        for (theirs, part) in [
            ("moebius run -ctk q3_k hi", "-ctk is not supported: \"q3_k\" is no type: use f16"),
            ("moebius run -cnv", "use `moebius chat`"),
            ("moebius serve --api-key x", "--api-key-file FILE"),
            ("moebius serve -np", "-np requires a value"),
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
            for row in TABLE.iter().filter(|row| row.is_known_to(command.get_name())) {
                for name in row.0 {
                    assert!(!all.iter().any(|own| own == name), "{} {name}", command.get_name());
                }
                let needed = match row.3 {
                    Is(name) => vec![name],
                    Sets(words) => words.iter().copied().filter(|word| word.starts_with('-')).collect(),
                    Nothing(_) | Refused(_) => Vec::new(),
                };
                let runs = ["run", "chat", "serve"].contains(&command.get_name());
                assert!(!runs || needed.iter().all(|name| all.iter().any(|own| own == name)), "{needed:?}");
            }
        }
    }
}
