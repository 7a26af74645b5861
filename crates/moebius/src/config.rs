//! Flags that come from the environment and from a file: `MOEBIUS_CTX=8192`, or `ctx = 8192` in
//! `~/.config/moebius/config.toml`. Both follow from the table of flags. What a user types goes before the environment,
//! that before the file, and that before the defaults.
//!
//! ```toml
//! threads = 8                 # for every command that has the flag
//!
//! [serve]                     # for one command
//! port = 9000
//!
//! [preset.coder]              # for one model, by the name that -m gives it
//! path = "~/models/Qwen3-Coder-30B-A3B-Q4_K_M.gguf"
//! ctx = 32768
//! temperature = 0.7
//! ```

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::{input, machine};

/// Longest file.
const MAX_BYTES: u64 = 1 << 20;
/// Maximum number of presets: where there are several models, each is a command of its flags.
const MAX_PRESETS: usize = 500;
/// How variables of flags begin.
const PREFIX: &str = "MOEBIUS_";
/// The table of presets, and the key in it that is no flag.
const PRESET: &str = "preset";
const PATH: &str = "path";

/// For whom a line of the file is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Scope {
    All,
    Command(String),
    Preset(String),
}

/// A line of the file.
#[derive(Clone, Debug)]
struct Entry {
    scope: Scope,
    flag: String,
    values: Vec<String>,
    is_switch: bool,
    line: usize,
}

/// A command line with what the environment and the file set.
#[derive(Debug, Default)]
pub struct Settled {
    /// The command, whose defaults are those of the file.
    pub command: Command,
    /// What was typed, with presets' names replaced by paths.
    pub args: Vec<OsString>,
    /// Where the command takes several models, those that have presets.
    pub presets: Vec<Preset>,
    /// The file, where there is one, and what it sets: flags with the lines they are on, the narrowest scope first.
    pub file: Option<PathBuf>,
    pub set: Vec<(String, usize)>,
    /// Everything that it has for single models.
    pub of_models: Vec<OfModel>,
}

/// A line of the file for one model.
#[derive(Clone, Debug)]
pub struct OfModel {
    pub preset: String,
    pub flag: String,
    pub values: Vec<String>,
    pub line: usize,
}

/// What the file has for one model.
#[derive(Clone, Debug)]
pub struct Preset {
    /// Its name.
    pub name: String,
    /// The model that it names; it is for a file of its own name where it names none.
    pub path: Option<PathBuf>,
    /// The command with these defaults.
    command: Command,
}

impl Preset {
    /// Returns whether it is for the model at `path`.
    pub fn is_for(&self, path: &Path) -> bool {
        match &self.path {
            Some(mine) => mine == path,
            None => is_called(&path.to_string_lossy(), &self.name),
        }
    }

    /// Returns what the arguments mean for this model.
    ///
    /// # Errors
    /// Flags that contradict each other.
    pub fn parse(&self, args: &[OsString]) -> Result<clap::ArgMatches, clap::Error> {
        self.command.clone().try_get_matches_from(args)
    }
}

/// Returns the command with what the environment and the file set, and the arguments with presets' names replaced by
/// paths.
///
/// # Errors
/// A sentence about the file: what cannot be read, or which line of it no command understands.
pub fn settle(command: Command, mut args: Vec<OsString>) -> Result<Settled, String> {
    let command = with_environment(command);
    let matches = command.clone().ignore_errors(true).try_get_matches_from(&args);
    let Some((name, given)) = matches.as_ref().ok().and_then(|matches| matches.subcommand()) else {
        return Ok(Settled { command, args, ..Settled::default() });
    };
    let named = given.try_get_one::<PathBuf>("config").ok().flatten().cloned();
    let path = match named {
        Some(path) => Some(path),
        // An empty name is none.
        None if is_empty("MOEBIUS_CONFIG") => None,
        None => usual_path().filter(|path| path.exists()),
    };
    let Some(path) = path else { return Ok(Settled { command, args, ..Settled::default() }) };
    let entries = read(&path, &command)?;
    let of = |scope: &Scope| entries.iter().filter(move |entry| entry.scope == *scope).cloned().collect::<Vec<_>>();
    let sections = [Scope::Command(name.to_string()), Scope::All].iter().flat_map(of).collect::<Vec<_>>();
    let typed = ["model", "named"].iter().find_map(|id| given.try_get_many::<PathBuf>(id).ok().flatten());
    let models: Vec<String> = match typed {
        Some(models) => models.map(|model| model.to_string_lossy().into_owned()).collect(),
        None => {
            sections.iter().find(|entry| entry.flag == "model").map(|entry| entry.values.clone()).unwrap_or_default()
        }
    };
    let path_of = |scope: &Scope| of(scope).into_iter().find(|entry| entry.flag == PATH)?.values.pop();
    let is_several = models.len() != 1 || given.try_get_one::<PathBuf>("models").is_ok_and(|folder| folder.is_some());
    let mut of_one = Vec::new();
    for model in &models {
        let preset = entries.iter().map(|entry| &entry.scope).find(|scope| match scope {
            Scope::Preset(preset) => is_called(model, preset),
            _ => false,
        });
        let Some(preset) = preset else { continue };
        if let Some(path) = path_of(preset) {
            replace_model(&mut args, model, &path, models.len() == 1);
        }
        if !is_several {
            of_one = of(preset);
        }
    }
    let with = |preset: Vec<Entry>| {
        let chosen = [preset, sections.clone()].concat();
        let mut sub = command.find_subcommand(name).cloned().unwrap_or_default();
        let mut set: Vec<&str> = Vec::new();
        for entry in &chosen {
            // The narrowest scope comes first.
            let Some(id) = find(&sub, &entry.flag).map(|arg| arg.get_id().clone()) else { continue };
            if !set.contains(&entry.flag.as_str()) {
                set.push(&entry.flag);
                sub = sub.mut_arg(id, |arg| arg.default_values(entry.values.clone()).required(false));
            }
        }
        command.clone().mut_subcommand(name, |_| sub)
    };
    let mut presets: Vec<Preset> = Vec::new();
    for scope in entries.iter().map(|entry| &entry.scope).filter(|_| is_several && name == "serve") {
        let Scope::Preset(preset) = scope else { continue };
        if presets.iter().all(|known| known.name != *preset) {
            let path = path_of(scope).map(PathBuf::from);
            presets.push(Preset { name: preset.clone(), path, command: with(of(scope)) });
        }
    }
    let set = of_one.iter().chain(&sections).map(|entry| (entry.flag.clone(), entry.line)).collect();
    let of_models = entries.iter().filter_map(|entry| match &entry.scope {
        Scope::Preset(preset) => Some(OfModel {
            preset: preset.clone(),
            flag: entry.flag.clone(),
            values: entry.values.clone(),
            line: entry.line,
        }),
        Scope::All | Scope::Command(_) => None,
    });
    let of_models = of_models.collect();
    Ok(Settled { command: with(of_one), args, presets, file: Some(path), set, of_models })
}

/// `$XDG_CONFIG_HOME/moebius/config.toml`, or the same under `~/.config`.
fn usual_path() -> Option<PathBuf> {
    Some(machine::Folder::Config.path()?.join("config.toml"))
}

/// Returns the variable of a flag.
pub fn variable(long: &str) -> String {
    format!("{PREFIX}{}", long.replace('-', "_").to_uppercase())
}

/// Returns variables that look like settings and are none, each with the nearest that is one, if any is near.
pub fn unknown_variables(command: &Command) -> Vec<(String, Option<String>)> {
    // Of builds and tests of the program itself.
    const OTHERS: [&str; 14] = [
        "NO_SKIP",
        "CI_BUDGET",
        "CI_FULL",
        "WIDE",
        "TYPES",
        "PART",
        "SHARE_OF_TYPES",
        "WITNESS",
        "ISAS",
        "SCHEDULES",
        "ALL_KERNELS",
        "METAL_SOURCES",
        "BUILD",
        "TEST",
    ];
    let command = with_environment(command.clone());
    let args = command.get_subcommands().chain([&command]).flat_map(Command::get_arguments);
    let known: HashSet<String> = args.filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned())).collect();
    let is_other = |rest: &str| {
        OTHERS.iter().any(|other| rest.strip_prefix(other).is_some_and(|r| r.is_empty() || r.starts_with('_')))
    };
    let set = std::env::vars_os().filter_map(|(name, value)| name.into_string().ok().filter(|_| !value.is_empty()));
    let mut unknown: Vec<_> = set
        .filter(|name| name.strip_prefix(PREFIX).is_some_and(|rest| !is_other(rest)) && !known.contains(name))
        .map(|name| {
            let near = known.iter().map(|known| (distance(&name, known), known)).filter(|(n, _)| *n <= 2);
            let near = near.min().map(|(_, known)| known.clone());
            (name, near)
        })
        .collect();
    unknown.sort();
    unknown
}

/// Returns the number of letters to change, add or leave out to make one word of another.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Gives every flag that has no variable one of its name.
fn with_environment(command: Command) -> Command {
    let with = |arg: Arg| {
        let Some(long) = arg.get_long().filter(|_| arg.get_env().is_none()) else { return arg };
        let name = variable(long);
        // A variable without a value sets nothing.
        let arg = if is_empty(&name) { arg } else { arg.env(name).hide_env(true) };
        match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        }
    };
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_string()).collect();
    let command = command.mut_args(with);
    names.into_iter().fold(command, |command, name| command.mut_subcommand(name, |sub| sub.mut_args(with)))
}

/// Returns whether a variable is there and holds nothing.
fn is_empty(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| value.is_empty())
}

/// Returns the argument of a flag.
fn find<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| {
        let names = arg.get_long_and_visible_aliases().unwrap_or_default();
        names.contains(&flag) && flag != "config"
    })
}

/// Returns whether a preset is for a model: its name, or that of the file.
fn is_called(model: &str, preset: &str) -> bool {
    let path = Path::new(model);
    let parts =
        [path.file_name(), path.file_stem()].map(|part| part.unwrap_or_default().to_string_lossy().into_owned());
    [model, &parts[0], &parts[1]].iter().any(|name| name.eq_ignore_ascii_case(preset))
}

/// Puts the path of a preset in the place of its name. The only model may have come from elsewhere than the arguments.
fn replace_model(args: &mut Vec<OsString>, name: &str, path: &str, is_only: bool) {
    for i in 1..args.len() {
        let whole = args[i].to_string_lossy().into_owned();
        let forms = [(name.to_string(), path.to_string()), (format!("--model={name}"), format!("--model={path}"))];
        // By itself it is a model where the command has no other words.
        let is_word = i >= 2 && !args[i - 1].to_string_lossy().starts_with('-') && args[1] != *"run";
        let is_value = whole != name || is_word || ["-m", "--model"].iter().any(|flag| args[i - 1] == *flag);
        if let Some((_, new)) = forms.into_iter().find(|(old, _)| *old == whole && is_value) {
            args[i] = new.into();
            return;
        }
    }
    // It came from the environment, or from the file itself.
    if is_only {
        args.splice(2..2, ["--model".into(), path.into()]);
    }
}

/// Reads a file and checks each line of it against the flags.
fn read(path: &Path, command: &Command) -> Result<Vec<Entry>, String> {
    let shown = path.display();
    let text = input::short(path, MAX_BYTES).map_err(|error| format!("failed to read {shown}: {error}"))?;
    let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line_of = |at: usize| ends.partition_point(|&end| end < at) + 1;
    let at = |line: usize, why: String| format!("{shown}:{line}: {why}");
    let table = DeTable::parse(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_of(span.start));
        at(line, error.message().to_string())
    })?;
    let mut entries = Vec::new();
    let mut add = |scope: Scope, key: &str, value: &Spanned<DeValue<'_>>, line: usize| {
        let (values, is_switch) =
            texts(value.get_ref()).ok_or_else(|| at(line, format!("{key} has no value of a flag")))?;
        entries.push(Entry { scope, flag: key.to_string(), values, is_switch, line });
        Ok::<(), String>(())
    };
    for (key, value) in table.get_ref() {
        let (name, line) = (key.get_ref().as_ref(), line_of(key.span().start));
        match value.get_ref() {
            DeValue::Table(presets) if name == PRESET && presets.len() > MAX_PRESETS => {
                return Err(at(line, format!("it has {} presets, at most {MAX_PRESETS} are allowed", presets.len())));
            }
            DeValue::Table(presets) if name == PRESET => {
                for (preset, flags) in presets {
                    let line = line_of(preset.span().start);
                    let DeValue::Table(flags) = flags.get_ref() else {
                        return Err(at(line, format!("preset.{} must be a table of flags", preset.get_ref())));
                    };
                    for (key, value) in flags {
                        let scope = Scope::Preset(preset.get_ref().to_string());
                        add(scope, key.get_ref(), value, line_of(key.span().start))?;
                    }
                }
            }
            DeValue::Table(flags) => {
                if command.find_subcommand(name).is_none_or(Command::is_hide_set) {
                    return Err(at(line, format!("there is no command {name}; presets of models are [preset.NAME]")));
                }
                for (key, value) in flags {
                    add(Scope::Command(name.to_string()), key.get_ref(), value, line_of(key.span().start))?;
                }
            }
            _ => add(Scope::All, name, value, line)?,
        }
    }
    entries.iter_mut().for_each(|entry| entry.flag = entry.flag.replace('_', "-"));
    for entry in &entries {
        check(entry, command).map_err(|why| at(entry.line, why))?;
    }
    Ok(entries)
}

/// Returns a value as a command line has it, and whether it is true or false.
fn texts(value: &DeValue<'_>) -> Option<(Vec<String>, bool)> {
    Some(match value {
        DeValue::String(text) => (vec![text.to_string()], false),
        DeValue::Integer(n) => (vec![n.to_string()], false),
        DeValue::Float(x) => (vec![x.to_string()], false),
        DeValue::Boolean(on) => (vec![on.to_string()], true),
        DeValue::Array(items) => {
            let items: Option<Vec<_>> = items.iter().map(|item| texts(item.get_ref())).collect();
            (items?.into_iter().flat_map(|(texts, _)| texts).collect(), false)
        }
        DeValue::Datetime(_) | DeValue::Table(_) => return None,
    })
}

/// Checks that a command knows a flag, and takes its value.
fn check(entry: &Entry, command: &Command) -> Result<(), String> {
    let Entry { scope, flag, values, is_switch, .. } = entry;
    if matches!(scope, Scope::Preset(_)) && flag == PATH {
        return match (values.as_slice(), is_switch) {
            ([one], false) if !one.is_empty() => Ok(()),
            _ => Err(format!("{flag} must be the name of one file or folder")),
        };
    }
    let of_model = ["run", "chat", "serve", "bench"];
    let known = command.get_subcommands().filter(|sub| match scope {
        Scope::All => !sub.is_hide_set(),
        Scope::Command(name) => sub.get_name() == name,
        Scope::Preset(_) => of_model.contains(&sub.get_name()),
    });
    let Some(arg) = known.into_iter().find_map(|sub| find(sub, flag)) else {
        return Err(match scope {
            Scope::Command(name) => format!("moebius {name} has no flag --{flag}"),
            Scope::All | Scope::Preset(_) => format!("no command has a flag --{flag}"),
        });
    };
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return if *is_switch { Ok(()) } else { Err(format!("{flag} must be true or false")) };
    }
    let mut alone = Arg::new("value").long("value").action(arg.get_action().clone()).allow_hyphen_values(true);
    alone = alone.value_parser(arg.get_value_parser().clone());
    if let Some(delimiter) = arg.get_value_delimiter() {
        alone = alone.value_delimiter(delimiter);
    }
    let words = values.iter().map(|value| format!("--value={value}"));
    let tried = Command::new("moebius").arg(alone).no_binary_name(true).try_get_matches_from(words);
    tried.map(drop).map_err(|error| {
        let text = error.to_string();
        let why = text.lines().next().unwrap_or_default().replace("'--value <value>'", flag);
        why.trim_start_matches("error: ").to_string()
    })
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};
    use engine::sampler::ParamValue;

    use super::*;
    use crate::args::{self, Cli};

    /// Returns the meaning of a command line with a file.
    fn parsed(file: &str, line: &[&str]) -> Result<Cli, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, file).unwrap();
        let mut args: Vec<OsString> = ["moebius"].iter().chain(line).map(OsString::from).collect();
        args.extend(["--config".into(), path.clone().into_os_string()]);
        let settled =
            settle(Cli::command(), args).map_err(|why| why.replace(&path.display().to_string(), "config.toml"))?;
        let matches = settled.command.try_get_matches_from(settled.args).map_err(|error| error.to_string())?;
        Cli::from_arg_matches(&matches).map_err(|error| error.to_string())
    }

    #[test]
    fn models_without_a_flag_have_presets_and_go_before_the_file() {
        let file = format!("{FILE}\n[chat]\nmodel = \"/m/other.gguf\"\n");
        let args::Command::Chat(chat) = parsed(&file, &["chat", "coder"]).unwrap().command else { panic!("chat") };
        assert_eq!(chat.model.named, Some(PathBuf::from("~/coder.gguf")));
        assert_eq!((chat.engine.ctx, top_k(&chat.sampling)), (Some(4096), Some(9)));
        // A prompt is no model, whatever it says.
        let args::Command::Run(run) = parsed(FILE, &["run", "coder"]).unwrap().command else { panic!("run") };
        assert_eq!((run.text.as_deref(), run.engine.ctx), (Some("coder"), None));
        let args::Command::Serve(serve) = parsed(FILE, &["serve", "coder"]).unwrap().command else { panic!("serve") };
        assert_eq!((serve.models(), serve.engine.ctx), (&[PathBuf::from("~/coder.gguf")][..], Some(4096)));
    }

    #[test]
    fn near_names_are_found() {
        for (a, b, n) in [("", "", 0), ("a", "", 1), ("THREAD", "THREADS", 1), ("CTZ", "CTX", 1), ("ab", "ba", 2)] {
            assert_eq!(distance(a, b), n, "{a} {b}");
        }
    }

    #[test]
    fn each_of_several_models_has_its_own_preset() {
        let file = format!("{FILE}\n[preset.small]\nctx = 512\ntemperature = 0.1\n");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, file).unwrap();
        let line = ["moebius", "serve", "-m", "coder", "--model=/m/small.gguf", "-m", "other.gguf", "--top-k", "1"];
        let mut args: Vec<OsString> = line.iter().map(OsString::from).collect();
        args.extend(["--config".into(), path.into_os_string()]);
        let Settled { command, args, presets, .. } = settle(Cli::command(), args).unwrap();
        let serve = |matches: &clap::ArgMatches| match Cli::from_arg_matches(matches).unwrap().command {
            args::Command::Serve(serve) => serve,
            _ => panic!("serve"),
        };
        let common = serve(&command.try_get_matches_from(&args).unwrap());
        let paths = ["~/coder.gguf", "/m/small.gguf", "other.gguf"].map(PathBuf::from);
        assert_eq!(common.model, paths);
        // No model's preset is another's, nor that of all.
        assert_eq!((common.engine.ctx, param(&common.sampling, "temperature"), common.port), (None, None, 9000));
        let own = paths.map(|path| {
            let preset = presets.iter().find(|preset| preset.is_for(&path))?;
            let serve = serve(&preset.parse(&args).unwrap());
            // What is typed goes before it.
            assert_eq!((param(&serve.sampling, "top_k"), serve.engine.threads), (Some(ParamValue::Count(1)), Some(2)));
            Some((preset.name.clone(), serve.engine.ctx, param(&serve.sampling, "temperature")))
        });
        let tenth = ParamValue::Number(0.1);
        let expected =
            [Some(("coder".to_string(), Some(4096), None)), Some(("small".into(), Some(512), Some(tenth))), None];
        assert_eq!(own, expected);
    }

    const FILE: &str = "threads = 3\ntop-k = 7\n\n[serve]\nport = 9000\ncors = [\"http://a.example\", \"*\"]\nthreads = 2\n\n\
                        [run]\nquiet = true\n\n[preset.coder]\npath = \"~/coder.gguf\"\nctx = 4096\ntop_k = 9\n";

    fn param(sampling: &args::SamplingArgs, name: &str) -> Option<ParamValue> {
        sampling.params.0.iter().find(|(param, _)| param.name == name).map(|(_, value)| *value)
    }

    fn top_k(sampling: &args::SamplingArgs) -> Option<i64> {
        param(sampling, "top_k").map(|value| if let ParamValue::Count(k) = value { k } else { -1 })
    }

    #[test]
    fn what_is_typed_goes_before_the_file_and_the_narrow_before_the_wide() {
        let args::Command::Run(run) = parsed(FILE, &["run", "hi"]).unwrap().command else { panic!() };
        assert_eq!(
            (run.engine.threads, top_k(&run.sampling), run.quiet, run.engine.ctx),
            (Some(3), Some(7), true, None)
        );
        let typed = ["run", "hi", "-m", "coder", "--top-k", "1"];
        let args::Command::Run(run) = parsed(FILE, &typed).unwrap().command else { panic!() };
        let model = run.model.model.unwrap();
        assert_eq!((model.to_str(), run.engine.ctx, top_k(&run.sampling)), (Some("~/coder.gguf"), Some(4096), Some(1)));
        let args::Command::Chat(chat) = parsed(FILE, &["chat", "--model=Coder"]).unwrap().command else { panic!() };
        assert_eq!((chat.engine.ctx, top_k(&chat.sampling)), (Some(4096), Some(9)));
        let args::Command::Serve(serve) = parsed(FILE, &["serve"]).unwrap().command else { panic!() };
        assert_eq!((serve.port, serve.engine.threads, serve.cors.len()), (9000, Some(2), 2));
        let args::Command::Serve(serve) = parsed(FILE, &["serve", "--port", "1", "--cors", "*"]).unwrap().command
        else {
            panic!()
        };
        assert_eq!((serve.port, serve.cors.len()), (1, 1));
    }

    #[test]
    fn mistakes_in_the_file_are_named_with_their_lines() {
        for (file, why) in [
            ("threads = 1\nthreats = 2\n", "config.toml:2: no command has a flag --threats"),
            ("[serve]\n\nquiet = true\n", "config.toml:3: moebius serve has no flag --quiet"),
            ("[nothing]\n", "config.toml:1: there is no command nothing"),
            ("[preset.x]\nport = 1\nfile = 2\nwrong = 1\n", "config.toml:4: no command has a flag --wrong"),
            ("ctx = \"many\"\n", "config.toml:1: invalid value 'many' for ctx"),
            ("\nctx = -5\n", "config.toml:2: invalid value '-5'"),
            ("[run]\nquiet = 3\n", "config.toml:2: quiet must be true or false"),
            ("config = \"x\"\n", "config.toml:1: no command has a flag --config"),
            ("[preset.a]\nctx = 9\npath = []\n", "config.toml:3: path must be the name of one file or folder"),
            ("[preset.a]\npath = [\"a\", \"b\"]\n", "config.toml:2: path must be the name of one"),
            ("[preset.a]\npath = \"\"\n", "config.toml:2: path must be the name of one"),
            ("[preset.a]\npath = true\n", "config.toml:2: path must be the name of one"),
            ("a = \n", "config.toml:1: "),
            ("ctx = 1979-05-27\n", "config.toml:1: ctx has no value of a flag"),
        ] {
            let error = parsed(file, &["run", "hi"]).unwrap_err();
            assert!(error.starts_with(why), "{file}: {error}");
        }
    }

    /// What is not a short text file is refused at once, and a file of many lines is read in time linear in it.
    #[test]
    fn settings_that_cost_too_much_are_refused() {
        let work = |line: &[&str], file: &Path| {
            let args = ["moebius"].iter().chain(line).chain(&["--config"]).map(OsString::from);
            settle(Cli::command(), args.chain([file.as_os_str().to_owned()]).collect()).map(drop)
        };
        #[cfg(unix)]
        assert!(
            work(&["models"], Path::new("/dev/zero")).is_err_and(|why| why.contains("it has more than 1048576 bytes"))
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        for (n, why) in [(40_000, Some("it has 40000 presets, at most 500 are allowed")), (500, None)] {
            let lines: String = (0..n).map(|n| format!("[preset.p{n}]\nctx=10\n")).collect();
            std::fs::write(&path, lines).unwrap();
            for line in [&["run", "hi"][..], &["serve", "--models", "."]] {
                let (read, took) = sys::rank::Work::default().run(|| work(line, &path));
                match why {
                    Some(why) => assert!(read.is_err_and(|error| error.contains(why)), "{line:?}"),
                    None => assert_eq!(read, Ok(()), "{line:?}"),
                }
                assert!(took < std::time::Duration::from_secs(3), "{line:?} of {n}: {took:?}");
            }
        }
    }

    #[test]
    fn every_flag_has_a_variable() {
        let command = with_environment(Cli::command());
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            for arg in sub.get_arguments().filter(|arg| arg.get_long().is_some()) {
                let name = arg.get_env().and_then(|name| name.to_str()).unwrap_or_default();
                assert!(name.starts_with("MOEBIUS_"), "{} {}", sub.get_name(), arg.get_id());
            }
        }
    }
}
