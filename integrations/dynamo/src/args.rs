//! The command line: flags of Dynamo's workers, and those of `moebius serve`, which go to the engine as they are.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};
use dynamo_backend_common::{CommonArgs, DisaggregationMode, WorkerConfig};

/// Seconds between the end of the time for running answers and the end of the process.
const RESERVE_SECONDS: u64 = 10;

/// A worker of NVIDIA Dynamo that computes with Moebius.
#[derive(Parser, Clone, Debug)]
#[command(
    name = "moebius-dynamo",
    version,
    after_help = "All other flags are those of `moebius serve` (--ctx, --parallel, --backend, --memory, ..), \
                  which `moebius serve --help` explains."
)]
pub struct Args {
    /// Model: a GGUF file, a model folder, or the name of a downloaded model. Without it the built-in one answers.
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Name that clients use for the model. By default the file's.
    #[arg(long, visible_alias = "served-model-name", value_name = "NAME")]
    pub name: Option<String>,
    /// Folder for the texts of a GGUF file: tokenizer and chat template, as the frontend reads them. All workers of a
    /// model need the same path. By default a folder in the system's folder for temporary files.
    #[arg(long, value_name = "FOLDER", env = "MOEBIUS_DYNAMO_TEXTS")]
    pub texts: Option<PathBuf>,
    /// Seconds that running answers have to finish after the worker was told to stop.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, env = "MOEBIUS_DYNAMO_DRAIN")]
    pub drain: u64,
    /// Do not tell the router what the prefix cache holds.
    #[arg(long, action = ArgAction::SetTrue)]
    pub no_kv_events: bool,
    #[command(flatten)]
    pub common: CommonArgs,
    /// Flags of the engine.
    #[arg(skip)]
    pub engine: Vec<OsString>,
}

/// What a command line asks for.
pub enum Parsed {
    /// To work.
    Run(Box<Args>),
    /// To print a text: help, or the version.
    Say(String),
}

impl Args {
    /// Parses a command line, whose first word is the program's name.
    ///
    /// # Errors
    /// What is wrong with it. Flags of the engine are judged where the model is loaded.
    pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Parsed, String> {
        let (own, engine) = split(words);
        let matches = match Args::command().try_get_matches_from(own) {
            Ok(matches) => matches,
            Err(said) if !said.use_stderr() => return Ok(Parsed::Say(said.to_string())),
            Err(said) => return Err(said.to_string().trim_start_matches("error: ").trim_end().to_string()),
        };
        let args = Args::from_arg_matches(&matches).map_err(|said| said.to_string())?;
        let mode = args.common.disaggregation_mode;
        if mode != DisaggregationMode::Aggregated {
            return Err(format!("--disaggregation-mode {mode:?} is not supported: a worker does prompts and answers"));
        }
        let offered = args.common.endpoint_types.split(',').map(str::trim);
        if let Some(other) = offered.into_iter().find(|name| !["chat", "completions"].contains(name)) {
            return Err(format!("--endpoint-types {other} is not supported: it may be chat, completions or both"));
        }
        if args.common.route_to_encoder {
            return Err("--route-to-encoder is not supported: workers take no images".into());
        }
        Ok(Parsed::Run(Box::new(Args { engine, ..args })))
    }

    /// Returns the flags of the engine, the model's among them.
    pub fn engine_flags(&self) -> Vec<OsString> {
        let model = self.model.iter().flat_map(|model| [OsString::from("-m"), model.into()]);
        model.chain(self.engine.iter().cloned()).collect()
    }

    /// Returns what Dynamo's worker is told. Writes the texts of a GGUF file, which it registers with the frontend.
    ///
    /// # Errors
    /// The model cannot be opened, or its texts cannot be written.
    pub fn worker(&self) -> Result<WorkerConfig> {
        let folder = crate::texts::folder(self.model.as_deref(), self.texts.as_deref())
            .context("failed to prepare the model's texts for the frontend")?;
        let common = self.common.clone();
        Ok(WorkerConfig {
            namespace: common.namespace,
            component: common.component,
            endpoint: common.endpoint,
            model_name: folder.to_string_lossy().into_owned(),
            served_model_name: self.name.clone(),
            endpoint_types: common.endpoint_types,
            custom_jinja_template: common.custom_jinja_template,
            tool_call_parser: common.dyn_tool_call_parser,
            reasoning_parser: common.dyn_reasoning_parser,
            exclude_tools_when_tool_choice_none: common.exclude_tools_when_tool_choice_none,
            disaggregation_mode: common.disaggregation_mode,
            enable_rl: common.enable_rl,
            runtime: common.runtime,
            enable_kv_routing: true,
            ..WorkerConfig::default()
        })
    }

    /// Returns variables of Dynamo's runtime that follow from flags, where the user has not set them.
    pub fn variables(&self) -> [(&'static str, String); 1] {
        [("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", (self.drain + RESERVE_SECONDS).to_string())]
    }
}

/// Splits a command line into the words that [`Args`] knows and those of the engine.
fn split(words: impl IntoIterator<Item = OsString>) -> (Vec<OsString>, Vec<OsString>) {
    // Whether a flag takes a value, by its name.
    let command = Args::command();
    let mut known: HashMap<String, bool> =
        ["-h", "--help", "-V", "--version"].into_iter().map(|name| (name.to_string(), false)).collect();
    for arg in command.get_arguments() {
        let takes_value = arg.get_action().takes_values();
        let long = arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten());
        known.extend(long.map(|name| (format!("--{name}"), takes_value)));
        known.extend(arg.get_short().map(|name| (format!("-{name}"), takes_value)));
    }
    let mut words = words.into_iter();
    let (mut own, mut engine): (Vec<OsString>, Vec<OsString>) = (words.next().into_iter().collect(), Vec::new());
    while let Some(word) = words.next() {
        let text = word.to_string_lossy().into_owned();
        let (name, has_value) = text.split_once('=').map_or((text.as_str(), false), |(name, _)| (name, true));
        match known.get(name) {
            Some(&takes_value) => {
                own.push(word);
                own.extend(words.by_ref().take(usize::from(takes_value && !has_value)));
            }
            None => engine.push(word),
        }
    }
    (own, engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Box<Args>, String> {
        match Args::parse(line.split(' ').map(OsString::from))? {
            Parsed::Run(args) => Ok(args),
            Parsed::Say(text) => Err(text),
        }
    }

    #[test]
    fn flags_go_where_they_belong() {
        let line = "moebius-dynamo -c 4096 -m a.gguf --parallel 4 --discovery-backend=file --request-plane tcp \
                    --backend cpu --name fox --no-kv-events";
        let args = parse(line).unwrap();
        assert_eq!(args.engine_flags(), ["-m", "a.gguf", "-c", "4096", "--parallel", "4", "--backend", "cpu"]);
        let runtime = &args.common.runtime;
        assert_eq!(runtime.discovery_backend.as_deref(), Some("file"));
        assert_eq!(runtime.request_plane.as_deref(), Some("tcp"));
        assert_eq!(args.name.as_deref(), Some("fox"));
        assert!(args.no_kv_events && args.model == Some("a.gguf".into()));
        assert_eq!(args.variables()[0].1, "310");
    }

    #[test]
    fn what_is_not_there_is_refused_by_its_name() {
        for (line, expected) in [
            ("moebius-dynamo --disaggregation-mode prefill", "--disaggregation-mode Prefill is not supported"),
            ("moebius-dynamo --endpoint-types chat,embeddings", "--endpoint-types embeddings is not supported"),
            ("moebius-dynamo --drain soon", "invalid value 'soon'"),
            ("moebius-dynamo --event-plane carrier-pigeon", "carrier-pigeon"),
        ] {
            let why = parse(line).unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
        assert!(parse("moebius-dynamo --help").unwrap_err().contains("moebius serve --help"));
    }
}
