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

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::machine;

/// Longest file.
const MAX_BYTES: u64 = 1 << 20;
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
    /// Whether it is for the model at `path`.
    pub fn is_for(&self, path: &Path) -> bool {
        match &self.path {
            Some(mine) => mine == path,
            None => is_called(&path.to_string_lossy(), &self.name),
        }
    }

    /// What the arguments mean for this model.
    ///
    /// # Errors
    /// Flags that contradict each other.
    pub fn parse(&self, args: &[OsString]) -> Result<clap::ArgMatches, clap::Error> {
        self.command.clone().try_get_matches_from(args)
    }
}

/// The command with what the environment and the file set, and the arguments with presets' names replaced by paths.
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
    let models: Vec<String> = match given.try_get_many::<PathBuf>("model") {
        Ok(Some(models)) => models.map(|model| model.to_string_lossy().into_owned()).collect(),
        _ => sections.iter().find(|entry| entry.flag == "model").map(|entry| entry.values.clone()).unwrap_or_default(),
    };
    let path_of = |scope: &Scope| Some(of(scope).into_iter().find(|entry| entry.flag == PATH)?.values.swap_remove(0));
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
    Ok(Settled { command: with(of_one), args, presets })
}

/// `$XDG_CONFIG_HOME/moebius/config.toml`, or the same under `~/.config`.
fn usual_path() -> Option<PathBuf> {
    Some(machine::Folder::Config.path()?.join("config.toml"))
}

/// Gives every flag a variable of its name.
fn with_environment(command: Command) -> Command {
    let with = |arg: Arg| {
        let Some(long) = arg.get_long() else { return arg };
        let name = format!("MOEBIUS_{}", long.replace('-', "_").to_uppercase());
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

/// Whether a variable is there and holds nothing.
fn is_empty(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| value.is_empty())
}

/// The argument of a flag.
fn find<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| {
        let names = arg.get_long_and_visible_aliases().unwrap_or_default();
        names.contains(&flag) && flag != "config"
    })
}

/// Whether a preset is for a model: its name, or that of the file.
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
        let is_value = whole != name || ["-m", "--model"].iter().any(|flag| args[i - 1] == *flag);
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
    let size = path.metadata().map(|meta| meta.len());
    let text = match size {
        Ok(bytes) if bytes > MAX_BYTES => {
            return Err(format!("{shown} has {bytes} bytes, at most {MAX_BYTES} are read"));
        }
        _ => std::fs::read_to_string(path).map_err(|error| format!("failed to read {shown}: {error}"))?,
    };
    let line_of = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
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

/// A value as a command line has it, and whether it is true or false.
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
        return Ok(());
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

    use super::*;
    use crate::args::{self, Cli};

    /// What a command line becomes beside a file.
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
    fn each_of_several_models_has_its_own_preset() {
        let file = format!("{FILE}\n[preset.small]\nctx = 512\ntemperature = 0.1\n");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, file).unwrap();
        let line = ["moebius", "serve", "-m", "coder", "--model=/m/small.gguf", "-m", "other.gguf", "--top-k", "1"];
        let mut args: Vec<OsString> = line.iter().map(OsString::from).collect();
        args.extend(["--config".into(), path.into_os_string()]);
        let Settled { command, args, presets } = settle(Cli::command(), args).unwrap();
        let serve = |matches: &clap::ArgMatches| match Cli::from_arg_matches(matches).unwrap().command {
            args::Command::Serve(serve) => serve,
            _ => panic!("serve"),
        };
        let common = serve(&command.try_get_matches_from(&args).unwrap());
        let paths = ["~/coder.gguf", "/m/small.gguf", "other.gguf"].map(PathBuf::from);
        assert_eq!(common.model, paths);
        // No model's preset is another's, nor that of all.
        assert_eq!((common.engine.ctx, common.sampling.temperature, common.port), (None, None, 9000));
        let own = paths.map(|path| {
            let preset = presets.iter().find(|preset| preset.is_for(&path))?;
            let serve = serve(&preset.parse(&args).unwrap());
            // What is typed goes before it.
            assert_eq!((serve.sampling.top_k, serve.engine.threads), (Some(1), Some(2)));
            Some((preset.name.clone(), serve.engine.ctx, serve.sampling.temperature))
        });
        let expected =
            [Some(("coder".to_string(), Some(4096), None)), Some(("small".into(), Some(512), Some(0.1))), None];
        assert_eq!(own, expected);
    }

    const FILE: &str = "threads = 3\ntop-k = 7\n\n[serve]\nport = 9000\ncors = [\"http://a.example\", \"*\"]\nthreads = 2\n\n\
                        [run]\nquiet = true\n\n[preset.coder]\npath = \"~/coder.gguf\"\nctx = 4096\ntop_k = 9\n";

    #[test]
    fn what_is_typed_goes_before_the_file_and_the_narrow_before_the_wide() {
        let args::Command::Run(run) = parsed(FILE, &["run", "hi"]).unwrap().command else { panic!() };
        assert_eq!((run.engine.threads, run.sampling.top_k, run.quiet, run.engine.ctx), (Some(3), Some(7), true, None));
        let typed = ["run", "hi", "-m", "coder", "--top-k", "1"];
        let args::Command::Run(run) = parsed(FILE, &typed).unwrap().command else { panic!() };
        let model = run.model.model.unwrap();
        assert_eq!((model.to_str(), run.engine.ctx, run.sampling.top_k), (Some("~/coder.gguf"), Some(4096), Some(1)));
        let args::Command::Chat(chat) = parsed(FILE, &["chat", "--model=Coder"]).unwrap().command else { panic!() };
        assert_eq!((chat.engine.ctx, chat.sampling.top_k), (Some(4096), Some(9)));
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
            ("a = \n", "config.toml:1: "),
            ("ctx = 1979-05-27\n", "config.toml:1: ctx has no value of a flag"),
        ] {
            let error = parsed(file, &["run", "hi"]).unwrap_err();
            assert!(error.starts_with(why), "{file}: {error}");
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
