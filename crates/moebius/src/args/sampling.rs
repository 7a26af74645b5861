//! Flags of the samplers: one for each row of [`PARAMS`].

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use engine::sampler::{PARAMS, Param, ParamKind, ParamValue, SamplerParams};

use super::parse::parse_bias;

/// Sampling parameters; those left out keep the model's defaults.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    #[command(flatten)]
    pub params: ParamArgs,
    /// Add BIAS to the logit of token ID; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers [default: from the clock]
    #[arg(short, long, value_name = "N")]
    pub seed: Option<u64>,
}

/// The parameters that were given, with their values.
#[derive(Debug, Clone, Default)]
pub struct ParamArgs(pub Vec<(&'static Param, ParamValue)>);

impl SamplingArgs {
    /// Puts the parameters that were given over `params`, except for the seed.
    pub fn apply(&self, params: &mut SamplerParams) {
        self.params.0.iter().for_each(|(param, value)| param.set(params, *value));
        params.logit_bias.extend_from_slice(&self.logit_bias);
    }
}

impl Args for ParamArgs {
    fn augment_args(command: Command) -> Command {
        PARAMS.iter().fold(command, |command, param| command.arg(flag(param)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        ParamArgs::augment_args(command)
    }
}

impl FromArgMatches for ParamArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<ParamArgs, clap::Error> {
        let value = |param: &'static Param| Some((param, *matches.get_one::<ParamValue>(param.name)?));
        Ok(ParamArgs(PARAMS.iter().filter_map(value).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = ParamArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the flag of a parameter: its name, with dashes.
fn flag(param: &'static Param) -> Arg {
    let dashed = |name: &str| name.replace('_', "-");
    let mut help = param.help.to_string();
    if let Some(first) = help.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    Arg::new(param.name)
        .long(dashed(param.name))
        .visible_aliases(param.aliases.iter().map(|name| dashed(name)))
        .value_name(if matches!(param.kind, ParamKind::Count { .. }) { "N" } else { "X" })
        .value_parser(move |text: &str| param.parse(text))
        .help(help)
}
