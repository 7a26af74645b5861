//! The table of numeric sampling parameters. Flags, fields of requests, the page's settings and the Python package's
//! options are derived from it: a new parameter is a field of [`SamplerParams`] and a row here.

use super::{Mirostat, SamplerParams};

/// A numeric sampling parameter.
#[derive(Debug, Clone, Copy)]
pub struct Param {
    /// Its name in requests; the flag has the same name with dashes.
    pub name: &'static str,
    /// Other names that flags and requests have for it.
    pub aliases: &'static [&'static str],
    /// Its name for people.
    pub label: &'static str,
    /// Where the page lists it.
    pub group: Group,
    /// Its effect, as a phrase that begins in lower case.
    pub help: &'static str,
    /// Its type, its range, and its place in [`SamplerParams`].
    pub kind: ParamKind,
}

/// Groups of parameters, as the page shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Those that most people know.
    Sampling,
    /// Penalties on repetition.
    Repetition,
    /// All others.
    More,
}

/// Types of parameters. What is set is within the range, ends included.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // Lowest and highest value; access to the parameter.
pub enum ParamKind {
    /// A number, and the step in which a form changes it.
    Number { low: f32, high: f32, step: f32, get: fn(&SamplerParams) -> f32, set: fn(&mut SamplerParams, f32) },
    /// A whole number; where it may be -1, that stands for all or off.
    Count { low: i64, high: i64, get: fn(&SamplerParams) -> i64, set: fn(&mut SamplerParams, i64) },
}

/// A value of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ParamValue {
    /// Of a [`ParamKind::Number`].
    Number(f32),
    /// Of a [`ParamKind::Count`].
    Count(i64),
}

impl Group {
    /// Returns its title.
    pub fn title(self) -> &'static str {
        match self {
            Group::Sampling => "Sampling",
            Group::Repetition => "Repetition",
            Group::More => "More samplers",
        }
    }
}

impl Param {
    /// Returns the parameter that has this name or alias.
    pub fn find(name: &str) -> Option<&'static Param> {
        PARAMS.iter().find(|param| param.names().any(|known| known == name))
    }

    /// Returns its name and its aliases.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }

    /// Returns its value.
    pub fn get(&self, params: &SamplerParams) -> ParamValue {
        match self.kind {
            ParamKind::Number { get, .. } => ParamValue::Number(get(params)),
            ParamKind::Count { get, .. } => ParamValue::Count(get(params)),
        }
    }

    /// Sets it. A value of the other type is converted.
    pub fn set(&self, params: &mut SamplerParams, value: ParamValue) {
        match (self.kind, value) {
            (ParamKind::Number { set, .. }, ParamValue::Number(value)) => set(params, value),
            (ParamKind::Number { set, .. }, ParamValue::Count(value)) => set(params, value as f32),
            (ParamKind::Count { set, .. }, ParamValue::Count(value)) => set(params, value),
            (ParamKind::Count { set, .. }, ParamValue::Number(value)) => set(params, value as i64),
        }
    }

    /// Parses a value of it.
    ///
    /// # Errors
    /// A phrase that says which values it takes.
    pub fn parse(&self, text: &str) -> Result<ParamValue, String> {
        match self.kind {
            ParamKind::Number { low, high, .. } => match text.parse::<f32>() {
                Ok(value) if (low..=high).contains(&value) => Ok(ParamValue::Number(value)),
                _ if high == f32::MAX && low == -f32::MAX => Err("it must be a number".into()),
                _ if high == f32::MAX => Err(format!("it must be a number of at least {low}")),
                _ => Err(format!("it must be a number from {low} to {high}")),
            },
            ParamKind::Count { low, high, .. } => match text.parse::<i64>() {
                Ok(value) if (low..=high).contains(&value) => Ok(ParamValue::Count(value)),
                _ => Err(format!("it must be a whole number from {low} to {high}")),
            },
        }
    }
}

/// Highest number of a count.
const MAX_COUNT: i64 = 1 << 31;
/// Tokens that a window of "all" covers.
const WHOLE_WINDOW: usize = 1 << 20;

/// A number of the field `$field`.
macro_rules! number {
    ($field:ident, $low:expr, $high:expr, $step:expr) => {
        ParamKind::Number {
            low: $low,
            high: $high,
            step: $step,
            get: |params| params.$field,
            set: |params, value| params.$field = value,
        }
    };
}

/// A count of the field `$field`; -1, where it is in the range, stands for `$all`.
macro_rules! count {
    ($field:ident, $low:expr, $all:expr) => {
        ParamKind::Count {
            low: $low,
            high: MAX_COUNT,
            get: |params| i64::try_from(params.$field).unwrap_or(i64::MAX),
            set: |params, value| params.$field = usize::try_from(value).unwrap_or($all),
        }
    };
}

const fn row(
    name: &'static str,
    aliases: &'static [&'static str],
    label: &'static str,
    group: Group,
    help: &'static str,
    kind: ParamKind,
) -> Param {
    Param { name, aliases, label, group, help, kind }
}

/// All numeric parameters, in the order of help texts and forms.
#[rustfmt::skip]
pub const PARAMS: &[Param] = &[
    row("temperature", &["temp"], "Temperature", Group::Sampling,
        "randomness of the choice; 0 always picks the most likely token",
        number!(temperature, 0.0, 100.0, 0.05)),
    row("top_p", &[], "Top p", Group::Sampling,
        "keep the most likely tokens that together reach this probability; 1 is off",
        number!(top_p, 0.0, 1.0, 0.01)),
    row("top_k", &[], "Top k", Group::Sampling,
        "keep this number of most likely tokens; 0 or -1 keeps all",
        count!(top_k, -1, 0)),
    row("min_p", &[], "Min p", Group::Sampling,
        "drop tokens with less than this share of the top token's probability; 0 is off",
        number!(min_p, 0.0, 1.0, 0.01)),
    row("repeat_penalty", &["repetition_penalty"], "Repeat penalty", Group::Repetition,
        "divide the logits of repeated tokens by this; 1 is off",
        ParamKind::Number {
        low: 0.0,
        high: f32::MAX,
        step: 0.01,
        get: |params| params.penalty_repeat,
        // Zero would divide by zero; clients that send it mean "off".
        set: |params, value| params.penalty_repeat = if value == 0.0 { 1.0 } else { value },
    }),
    row("repeat_last_n", &[], "Repeat window", Group::Repetition,
        "number of last tokens that the penalties cover; -1 covers all",
        count!(penalty_last_n, -1, WHOLE_WINDOW)),
    row("presence_penalty", &[], "Presence penalty", Group::Repetition,
        "subtract this once from the logit of a token that occurred",
        number!(penalty_presence, -100.0, 100.0, 0.1)),
    row("frequency_penalty", &[], "Frequency penalty", Group::Repetition,
        "subtract this from the logit of a token for each time it occurred",
        number!(penalty_frequency, -100.0, 100.0, 0.1)),
    row("dry_multiplier", &[], "DRY multiplier", Group::Repetition,
        "DRY: strength of the penalty on repeated sequences; 0 is off",
        number!(dry_multiplier, 0.0, f32::MAX, 0.1)),
    row("dry_base", &[], "DRY base", Group::Repetition,
        "DRY: base of the penalty's growth with the length of the repetition",
        number!(dry_base, 0.0, f32::MAX, 0.05)),
    row("dry_allowed_length", &[], "DRY allowed length", Group::Repetition,
        "DRY: length of the longest repetition without a penalty",
        count!(dry_allowed_length, 0, 0)),
    row("dry_penalty_last_n", &[], "DRY window", Group::Repetition,
        "DRY: number of last tokens that the penalty covers; -1 covers all",
        count!(dry_last_n, -1, WHOLE_WINDOW)),
    row("typical_p", &["typical"], "Typical p", Group::More,
        "locally typical sampling: keep tokens of typical information up to this probability; 1 is off",
        number!(typical_p, 0.0, 1.0, 0.01)),
    row("top_n_sigma", &[], "Top n sigma", Group::More,
        "keep logits within this number of standard deviations of the best; 0 or below is off",
        number!(top_n_sigma, -f32::MAX, f32::MAX, 0.1)),
    row("xtc_probability", &[], "XTC probability", Group::More,
        "XTC: probability of excluding the top choices; 0 is off",
        number!(xtc_probability, 0.0, 1.0, 0.05)),
    row("xtc_threshold", &[], "XTC threshold", Group::More,
        "XTC: minimum probability of a top choice",
        number!(xtc_threshold, 0.0, 1.0, 0.05)),
    row("dynatemp_range", &[], "Dynamic temperature range", Group::More,
        "maximum change of the temperature with the entropy; 0 is off",
        number!(dynatemp_range, 0.0, f32::MAX, 0.05)),
    row("dynatemp_exponent", &[], "Dynamic temperature exponent", Group::More,
        "exponent of the normalized entropy in the dynamic temperature",
        number!(dynatemp_exponent, 0.0, f32::MAX, 0.1)),
    row("min_keep", &[], "Min keep", Group::More,
        "number of tokens that every truncating sampler keeps at least",
        count!(min_keep, 0, 0)),
    row("mirostat", &[], "Mirostat version", Group::More,
        "version of mirostat, 1 or 2, which replaces the other samplers; 0 is off",
        ParamKind::Count {
        low: 0,
        high: 2,
        get: |params| match params.mirostat {
            Mirostat::Off => 0,
            Mirostat::V1 => 1,
            Mirostat::V2 => 2,
        },
        set: |params, value| {
            params.mirostat = match value {
                1 => Mirostat::V1,
                2 => Mirostat::V2,
                _ => Mirostat::Off,
            }
        },
    }),
    row("mirostat_tau", &[], "Mirostat tau", Group::More,
        "mirostat: target surprise in bits",
        number!(mirostat_tau, 0.0, f32::MAX, 0.1)),
    row("mirostat_eta", &[], "Mirostat eta", Group::More,
        "mirostat: learning rate",
        number!(mirostat_eta, 0.0, 1.0, 0.01)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_reaches_its_own_field() {
        for param in PARAMS {
            let mut params = SamplerParams::default();
            let value = match param.get(&params) {
                ParamValue::Number(value) => ParamValue::Number(if value == 0.25 { 0.5 } else { 0.25 }),
                ParamValue::Count(value) => ParamValue::Count(if value == 1 { 2 } else { 1 }),
            };
            param.set(&mut params, value);
            assert_ne!(params, SamplerParams::default(), "{}", param.name);
            for other in PARAMS {
                let expected = if other.name == param.name { value } else { other.get(&SamplerParams::default()) };
                assert_eq!(other.get(&params), expected, "{} sets {}", param.name, other.name);
            }
        }
    }

    #[test]
    fn names_are_unique_and_defaults_are_in_range() {
        let names: Vec<&str> = PARAMS.iter().flat_map(Param::names).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(!names[..i].contains(name), "{name}");
            assert!(Param::find(name).is_some());
        }
        for param in PARAMS {
            let default = match param.get(&SamplerParams::default()) {
                ParamValue::Number(value) => value.to_string(),
                ParamValue::Count(value) => value.to_string(),
            };
            assert!(param.parse(&default).is_ok(), "{} {default}", param.name);
            for wrong in ["", "x", "NaN", "inf", "1e999", "9999999999"] {
                let is_number = matches!(param.kind, ParamKind::Number { high: f32::MAX, .. });
                assert!(param.parse(wrong).is_err() || (is_number && wrong == "9999999999"), "{} {wrong}", param.name);
            }
        }
    }

    #[test]
    fn minus_one_is_all_and_a_penalty_of_zero_is_off() {
        let mut params = SamplerParams::default();
        for (name, value) in [
            ("top_k", ParamValue::Count(-1)),
            ("repeat_last_n", ParamValue::Count(-1)),
            ("repetition_penalty", ParamValue::Number(0.0)),
        ] {
            Param::find(name).unwrap().set(&mut params, value);
        }
        assert_eq!((params.top_k, params.penalty_last_n, params.penalty_repeat), (0, WHOLE_WINDOW, 1.0));
    }
}
