//! `moebius config`: what counts for a command, and where it comes from.

use anyhow::{Result, anyhow, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, Command};
use serde_json::json;

use crate::args::ConfigArgs;
use crate::config::{self, Settled};
use crate::out::{self, say};

pub fn run(args: &ConfigArgs, cli: Command) -> Result<()> {
    let name = args.command.as_str();
    if cli.find_subcommand(name).is_none_or(Command::is_hide_set) {
        bail!("there is no command {name}; `moebius --help` lists them");
    }
    let line = ["moebius", name].map(Into::into).to_vec();
    let settled = config::settle(cli, line).map_err(|why| anyhow!("{why}"))?;
    let Settled { command, args: line, file, set, of_models, .. } = settled;
    // Flags that a command requires are missing, which is no mistake here.
    let strict = command.clone().try_get_matches_from(&line);
    let matches = match strict {
        Err(error) if error.kind() == clap::error::ErrorKind::MissingRequiredArgument => {
            command.clone().ignore_errors(true).try_get_matches_from(&line)?
        }
        strict => strict?,
    };
    let (Some((_, given)), Some(sub)) = (matches.subcommand(), command.find_subcommand(name)) else { return Ok(()) };
    let shown = file.as_ref().map(|path| path.display().to_string());
    let rows: Vec<[String; 3]> =
        sub.get_arguments().filter_map(|arg| row(arg, given, &set, shown.as_deref())).collect();
    if args.json {
        let rows: Vec<_> =
            rows.iter().map(|[flag, value, source]| json!({"flag": flag, "value": value, "source": source})).collect();
        let of_models: Vec<_> = of_models
            .iter()
            .map(|one| json!({"preset": one.preset, "flag": one.flag, "values": one.values, "line": one.line}))
            .collect();
        return out::json_line(&json!({"command": name, "file": shown, "settings": rows, "presets": of_models}));
    }
    match &shown {
        Some(path) => say!("file: {}", path)?,
        None => say!("file: none (~/.config/moebius/config.toml is read if it is there)")?,
    }
    for [flag, value, source] in &rows {
        say!("{flag:<22} {:<30} {}", value, source)?;
    }
    for one in &of_models {
        let flag = format!("[preset.{}] {}", one.preset, one.flag);
        say!("{:<22} {:<30} line {}", &flag, one.values.join(", "), one.line)?;
    }
    Ok(())
}

/// Returns flag, value and source of an argument that has a value.
fn row(arg: &Arg, given: &clap::ArgMatches, set: &[(String, usize)], file: Option<&str>) -> Option<[String; 3]> {
    let long = arg.get_long().filter(|long| !["help", "version"].contains(long))?;
    let id = arg.get_id().as_str();
    let values = given.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy().into_owned());
    let value = match arg.get_action() {
        ArgAction::SetTrue => given.get_flag(id).to_string(),
        _ => values.collect::<Vec<_>>().join(", "),
    };
    let names = arg.get_long_and_visible_aliases().unwrap_or_default();
    let line = set.iter().find(|(flag, _)| names.contains(&flag.as_str())).map(|(_, line)| *line);
    let source = match (given.value_source(id)?, line, file) {
        (ValueSource::EnvVariable, ..) => {
            arg.get_env().map_or_else(|| config::variable(long), |name| name.to_string_lossy().into_owned())
        }
        (_, Some(line), Some(file)) => format!("{file}:{line}"),
        _ if value == "false" => return None,
        _ => "default".into(),
    };
    Some([format!("--{long}"), value, source])
}
