//! Which layers attend over a sliding window: from the keys of a file to one answer a layer.
//!
//! A file that gives a window but not the layers it holds for is read as its architecture says, or refused: a layer
//! that sees more than it was trained to see computes something else.

use checkpoint::{Value, ValueKind};

use super::keys::{Key, Keys, MAX_CONTEXT, N_CTX_TRAIN, key};
use crate::Error;
use crate::error::printable;

const WINDOW: Key = key("attention.sliding_window", &["sliding_window"]);
const PATTERN: Key = key(
    "attention.sliding_window_pattern",
    &["layer_types", "sliding_window_pattern", "hybrid_layer_pattern", "global_attn_every_n_layers"],
);
/// Qwen's switch, which goes before its window.
const USE_WINDOW: Key = key("", &["use_sliding_window"]);
/// Qwen's number of layers in front that see everything.
const N_FULL_FIRST: Key = key("", &["max_window_layers"]);

/// The layers that a window holds for where the file names none.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unnamed {
    /// All of them (Mistral).
    All,
    /// All but every `n`-th (Gemma 3, gpt-oss).
    ButEvery(usize),
    /// All but the first of every `n` (Laguna).
    ButFirstOf(usize),
    /// None can be told: an error, unless the window is as long as the context.
    Unknown,
}

/// Returns the window of every layer, the position itself included; `None` for layers that see everything.
pub(super) fn windows(keys: &Keys, n_layer: usize, unnamed: Unnamed) -> Result<Vec<Option<usize>>, Error> {
    let window = match keys.opt_bool(USE_WINDOW)? {
        Some(false) => None,
        _ => Some(keys.count_or_zero(WINDOW, MAX_CONTEXT)?).filter(|&n| n > 0),
    };
    let windowed = match pattern(keys, n_layer)? {
        Some(pattern) => pattern,
        None => match (window, unnamed) {
            (None, _) => vec![false; n_layer],
            (Some(_), Unnamed::All) => vec![true; n_layer],
            (Some(_), Unnamed::ButEvery(n)) => but_every(n, n_layer),
            (Some(_), Unnamed::ButFirstOf(n)) => (0..n_layer).map(|layer| layer % n != 0).collect(),
            (Some(window), Unnamed::Unknown) => unknown(keys, window, n_layer)?,
        },
    };
    match (window, windowed.iter().position(|&w| w)) {
        (None, Some(layer)) => {
            Err(keys.error(WINDOW, format!("is missing or 0, and layer {layer} is said to see a window")))
        }
        (window, _) => Ok(windowed.into_iter().map(|w| window.filter(|_| w)).collect()),
    }
}

/// Returns the window of tokens that see each other, from the number that files of encoders have, which is that of the
/// positions before a token and after it: half of them are on each side, and seen.
pub(super) fn both_ways(n: usize) -> usize {
    n / 2 + 1
}

/// Returns what the file says of each layer.
pub(super) fn pattern(keys: &Keys, n_layer: usize) -> Result<Option<Vec<bool>>, Error> {
    let Some(name) = keys.name(PATTERN) else { return Ok(None) };
    let meta = keys.meta();
    let pattern = match meta.get(&name) {
        None => return Ok(None),
        Some(Value::Strings(types)) => types
            .iter()
            .enumerate()
            .map(|(layer, text)| match std::str::from_utf8(text).ok() {
                Some("sliding_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                other => {
                    let found = printable(other.unwrap_or("no text"));
                    let what = format!("names layer {layer} {found}, expected sliding_attention or full_attention");
                    Err(keys.error(PATTERN, what))
                }
            })
            .collect::<Result<_, _>>()?,
        Some(Value::Numbers(list)) if list.element() == ValueKind::Bool => meta.bools(&name)?,
        Some(Value::Numbers(_)) => meta.u32s(&name)?.into_iter().map(|n| n != 0).collect(),
        // One number n: every n-th layer sees everything; with 0 none does.
        Some(_) => match keys.count_or_zero(PATTERN, usize::MAX)? {
            0 => vec![true; n_layer],
            n => but_every(n, n_layer),
        },
    };
    keys.of_layers(&name, "layers", pattern, n_layer).map(Some)
}

fn but_every(n: usize, n_layer: usize) -> Vec<bool> {
    (0..n_layer).map(|layer| layer % n != n - 1).collect()
}

fn unknown(keys: &Keys, window: usize, n_layer: usize) -> Result<Vec<bool>, Error> {
    if let Some(name) = keys.name(N_FULL_FIRST)
        && let Some(first) = keys.meta().opt_u64(&name)?
    {
        return Ok((0..n_layer).map(|layer| layer as u64 >= first).collect());
    }
    let n_ctx = keys.count(N_CTX_TRAIN, MAX_CONTEXT)?;
    if window >= n_ctx {
        return Ok(vec![false; n_layer]);
    }
    let what = format!("is {window} of a context of {n_ctx}, and nothing says which layers it holds for");
    Err(keys.error(WINDOW, what))
}
