//! Contexts that a user stretches beyond the trained one: the scaling rule of a model's rotary embedding, set in its
//! metadata before a plan is built, so that architectures read it as if the file had said it.

use checkpoint::{Checkpoint, Value};

use crate::plan::{LongRopes, Plan, RopeDecl};
use crate::rope;

use super::keys::{FACTOR, Keys, MAX_CONTEXT, N_CTX_ORIG, N_CTX_TRAIN, ROPE_FREQS, ROPE_LONG, ROPE_SECTIONS, SCALING};
use crate::error::Error;

/// How positions are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StretchRule {
    /// All positions are divided by the factor (arXiv 2306.15595).
    Linear,
    /// YaRN (arXiv 2309.00071), with its authors' parameters or those of the file.
    Yarn,
    /// Dynamic NTK: contexts beyond the trained one have the base of the longest.
    Dynamic,
}

impl StretchRule {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            StretchRule::Linear => "linear",
            StretchRule::Yarn => "yarn",
            StretchRule::Dynamic => "dynamic",
        }
    }
}

/// A longer context for a model that was not made for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch {
    /// How.
    pub rule: StretchRule,
    /// New context over old, more than 1.
    pub factor: f64,
    /// Context before, where it is not what the file says.
    pub n_ctx_orig: Option<usize>,
}

/// Gives a plan the rotary embedding of longer contexts by dynamic NTK scaling, where the file has that rule. Layers
/// that rotate differently keep what they have.
pub(super) fn dynamic(checkpoint: &Checkpoint, mut plan: Plan) -> Result<Plan, Error> {
    let Some((n_ctx, factor)) = Keys::new(checkpoint, &[]).dynamic()? else { return Ok(plan) };
    let turns = |rope: &&RopeDecl| rope.inv_freq.iter().any(|&f| f != 0.0);
    let mut turning = plan.ropes.iter().filter(turns);
    let Some(first) = turning.next() else { return Ok(plan) };
    if plan.long_ropes.is_none() && turning.all(|rope| rope.inv_freq == first.inv_freq) {
        let ropes = plan.ropes.iter().map(|own| rope::dynamic(own, factor)).collect();
        let n_ctx_max = (n_ctx as f64 * factor).min(MAX_CONTEXT as f64) as usize;
        plan.long_ropes = Some(LongRopes { n_ctx, n_ctx_max, ropes });
    }
    Ok(plan)
}

/// Sets the scaling rule of a checkpoint, and the context that it gives.
///
/// # Errors
/// The file has a rule of another kind, or more than one rotary embedding with rules; the context would be absurd.
pub(crate) fn stretch(checkpoint: &mut Checkpoint, stretch: Stretch) -> Result<(), Error> {
    let keys = Keys::new(checkpoint, &[]);
    let name = |key| keys.name_in(ROPE_SECTIONS, key).unwrap_or_default();
    let refuse = |what: String| Err(keys.error_at(name(SCALING), what));
    let rule = stretch.rule.name();
    let own = keys.meta().opt_str(&name(SCALING))?;
    let may_stay = |own: &&str| ["none", "default"].contains(own) || (*own == rule && rule != "linear");
    if let Some(own) = own.filter(|own| !may_stay(own)) {
        return refuse(format!("is {}, which {rule} cannot replace", crate::error::printable(own)));
    }
    if let Some(tensor) = [ROPE_FREQS, ROPE_LONG].into_iter().find(|name| checkpoint.tensor(name).is_some()) {
        return refuse(format!("cannot become {rule}: the tensor {tensor} scales positions already"));
    }
    let is_nested = |key: &str| key.strip_prefix("rope_parameters.").is_some_and(|rest| rest.contains('.'));
    if keys.meta().iter().any(|(key, _)| is_nested(key)) {
        return refuse(format!("cannot become {rule}: layers have different rotary embeddings"));
    }
    let n_orig = match stretch.n_ctx_orig {
        Some(n) => keys.in_range(&name(N_CTX_ORIG), n as u64, MAX_CONTEXT)?,
        None => match keys.meta().opt_u64(&name(N_CTX_ORIG))? {
            Some(n) => keys.in_range(&name(N_CTX_ORIG), n, MAX_CONTEXT)?,
            None => keys.count(N_CTX_TRAIN, MAX_CONTEXT)?,
        },
    };
    let n_ctx = keys.in_range(&name(N_CTX_TRAIN), (n_orig as f64 * stretch.factor) as u64, MAX_CONTEXT)?;
    // Where a folder says something of the rule, it is read there first.
    let names = match keys.is_folder() {
        false => [SCALING, FACTOR, N_CTX_ORIG].map(name),
        true => {
            let has_new = keys.meta().iter().any(|(key, _)| key.starts_with("rope_parameters."));
            let section = if has_new { "rope_parameters." } else { "rope_scaling." };
            ["rope_type", "factor", "original_max_position_embeddings"].map(|name| format!("{section}{name}"))
        }
    };
    let n_ctx_name = name(N_CTX_TRAIN);
    let [kind, factor, orig] = names;
    let meta = checkpoint.meta_mut();
    meta.set(&kind, rule.into());
    meta.set(&factor, Value::F32(stretch.factor as f32));
    meta.set(&orig, Value::U32(n_orig as u32));
    meta.set(&n_ctx_name, Value::U32(n_ctx as u32));
    Ok(())
}
