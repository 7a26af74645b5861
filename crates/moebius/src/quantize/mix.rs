//! Which type each tensor gets: the mixes behind the names that users know from llama.cpp.
//!
//! A name such as `Q4_K_M` is one type for most matrices and more bits for those that suffer most: the output,
//! attention's values, and `ffn_down` of some layers. The rules are llama.cpp's (`src/llama-quant.cpp`), so that a name
//! means the same file; a test compares them with files that its program made.

use anyhow::{Result, bail, ensure};
use checkpoint::{Metadata, Value};
use quant::WeightType;
use regex::Regex;

/// The mixes: names of file types that stand for a choice of types, and the plain types.
#[allow(non_camel_case_types)] // As users write them.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ2_M,
    Q2_K_S,
    Q2_K,
    IQ3_XXS,
    IQ3_XS,
    Q3_K_S,
    IQ3_S,
    IQ3_M,
    Q3_K_M,
    Q3_K_L,
    MXFP4,
    NVFP4,
    IQ4_XS,
    IQ4_NL,
    Q4_0,
    Q4_1,
    Q4_K_S,
    Q4_K_M,
    Q5_0,
    Q5_1,
    Q5_K_S,
    Q5_K_M,
    Q6_K,
    Q8_0,
    BF16,
    F16,
    F32,
}

/// A file type, as `general.file_type` numbers it.
#[derive(Debug, PartialEq, Eq)]
pub struct FileType {
    pub mix: Mix,
    pub name: &'static str,
    /// `llama_ftype` of llama.cpp's `llama.h`.
    pub id: u32,
    /// The type of most matrices.
    pub base: WeightType,
}

impl Mix {
    /// Returns whether it has about two bits or less, which has its own rules.
    fn is_tiny(self) -> bool {
        matches!(self, Mix::IQ1_S | Mix::IQ1_M | Mix::IQ2_XXS | Mix::IQ2_XS | Mix::IQ2_S | Mix::IQ2_M)
    }
}

/// A row of the table of file types; mix and name are the same word.
macro_rules! file {
    ($mix:ident, $id:expr, $base:expr) => {
        FileType { mix: Mix::$mix, name: stringify!($mix), id: $id, base: $base }
    };
}

/// All kinds that are written, smallest first, then the floats.
pub const FILE_TYPES: [FileType; 34] = [
    file!(IQ1_S, 24, WeightType::IQ1_S),
    file!(IQ1_M, 31, WeightType::IQ1_M),
    file!(TQ1_0, 36, WeightType::TQ1_0),
    file!(TQ2_0, 37, WeightType::TQ2_0),
    file!(IQ2_XXS, 19, WeightType::IQ2_XXS),
    file!(IQ2_XS, 20, WeightType::IQ2_XS),
    file!(IQ2_S, 28, WeightType::IQ2_XS),
    file!(IQ2_M, 29, WeightType::IQ2_S),
    file!(Q2_K_S, 21, WeightType::Q2_K),
    file!(Q2_K, 10, WeightType::Q2_K),
    file!(IQ3_XXS, 23, WeightType::IQ3_XXS),
    file!(IQ3_XS, 22, WeightType::IQ3_S),
    file!(Q3_K_S, 11, WeightType::Q3_K),
    file!(IQ3_S, 26, WeightType::IQ3_S),
    file!(IQ3_M, 27, WeightType::IQ3_S),
    file!(Q3_K_M, 12, WeightType::Q3_K),
    file!(Q3_K_L, 13, WeightType::Q3_K),
    file!(MXFP4, 38, WeightType::MXFP4),
    file!(NVFP4, 39, WeightType::NVFP4),
    file!(IQ4_XS, 30, WeightType::IQ4_XS),
    file!(IQ4_NL, 25, WeightType::IQ4_NL),
    file!(Q4_0, 2, WeightType::Q4_0),
    file!(Q4_1, 3, WeightType::Q4_1),
    file!(Q4_K_S, 14, WeightType::Q4_K),
    file!(Q4_K_M, 15, WeightType::Q4_K),
    file!(Q5_0, 8, WeightType::Q5_0),
    file!(Q5_1, 9, WeightType::Q5_1),
    file!(Q5_K_S, 16, WeightType::Q5_K),
    file!(Q5_K_M, 17, WeightType::Q5_K),
    file!(Q6_K, 18, WeightType::Q6_K),
    file!(Q8_0, 7, WeightType::Q8_0),
    file!(BF16, 32, WeightType::BF16),
    file!(F16, 1, WeightType::F16),
    file!(F32, 0, WeightType::F32),
];

/// Other names of the same kinds.
const ALIASES: [(&str, &str); 4] = [("Q3_K", "Q3_K_M"), ("Q4_K", "Q4_K_M"), ("Q5_K", "Q5_K_M"), ("MXFP4_MOE", "MXFP4")];

/// Returns the kind of file of this name, in any case.
///
/// # Errors
/// There is none; lists them.
pub fn file_type(name: &str) -> Result<&'static FileType> {
    let upper = name.to_ascii_uppercase();
    let known = ALIASES.iter().find(|(alias, _)| *alias == upper).map_or(upper.as_str(), |(_, name)| name);
    match FILE_TYPES.iter().find(|file| file.name == known) {
        Some(file) => Ok(file),
        None => {
            let names: Vec<&str> = FILE_TYPES.iter().map(|file| file.name).collect();
            bail!("failed to choose a type: {name} is none of {}", names.join(", "))
        }
    }
}

/// Returns the weight type of this name, in any case.
fn weight_type(name: &str) -> Result<WeightType> {
    let lower = name.to_ascii_lowercase();
    match WeightType::GGUF.into_iter().find(|t| t.name() == lower) {
        Some(t) => Ok(t),
        None => bail!("{name} is none of {}", WeightType::GGUF.map(|t| t.name().to_uppercase()).join(", ")),
    }
}

/// A user's choice for the tensors whose name a pattern matches.
#[derive(Clone, Debug)]
pub struct Override {
    pub text: String,
    pattern: Regex,
    dtype: WeightType,
}

impl Override {
    /// Returns whether it speaks of the tensor of this name.
    pub fn matches(&self, name: &str) -> bool {
        self.pattern.is_match(name)
    }
}

/// Parses `PATTERN=TYPE`.
pub fn parse_override(text: &str) -> Result<Override, String> {
    let (pattern, dtype) = text.rsplit_once('=').ok_or("expected PATTERN=TYPE, for example ffn_down_exps=Q6_K")?;
    let pattern = Regex::new(pattern).map_err(|error| error.to_string())?;
    let dtype = weight_type(dtype).map_err(|error| error.to_string())?;
    Ok(Override { text: text.into(), pattern, dtype })
}

/// A tensor that waits for its type.
pub struct Tensor<'a> {
    pub name: &'a str,
    /// Shape, slowest axis first.
    pub shape: &'a [usize],
    pub dtype: WeightType,
}

/// What the rules want to know of a model.
struct Model {
    arch: String,
    n_layer: usize,
    n_expert: usize,
    /// Query heads a key head, of the first layer.
    n_group: usize,
    /// Whether the embedding is the output too.
    is_tied: bool,
    has_importance: bool,
}

impl Model {
    fn read(meta: &Metadata, tensors: &[Tensor], has_importance: bool) -> Result<Model> {
        let arch = meta.opt_str("general.architecture")?.unwrap_or_default().to_string();
        // Some architectures have a number for each layer.
        let count = |key: &str| match meta.get(&format!("{arch}.{key}")) {
            Some(Value::Numbers(_)) => meta.opt_u32s(&format!("{arch}.{key}")).ok().flatten()?.first().copied(),
            Some(value) => u32::try_from(value.to_int()?).ok(),
            None => None,
        };
        let n_head = count("attention.head_count").unwrap_or(0);
        let n_kv = count("attention.head_count_kv").unwrap_or(n_head);
        Ok(Model {
            n_layer: count("block_count").unwrap_or(0) as usize,
            n_expert: count("expert_count").unwrap_or(0) as usize,
            n_group: n_head.checked_div(n_kv).unwrap_or(0) as usize,
            is_tied: !tensors.iter().any(|t| t.name == "output.weight"),
            has_importance,
            arch,
        })
    }
}

/// What a tensor is for, as far as the rules care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Output,
    Embedding,
    AttentionQ,
    AttentionK,
    AttentionV,
    AttentionOut,
    FfnUp,
    FfnGate,
    FfnDown,
    Other,
}

impl Role {
    fn of(name: &str) -> Role {
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        match () {
            () if name == "output.weight" => Role::Output,
            () if ["token_embd.weight", "per_layer_token_embd.weight"].contains(&name) => Role::Embedding,
            () if has(&["attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"]) => Role::AttentionV,
            () if has(&["attn_k.weight"]) => Role::AttentionK,
            () if has(&["attn_q.weight"]) => Role::AttentionQ,
            () if has(&["attn_output.weight"]) => Role::AttentionOut,
            () if has(&["ffn_up"]) => Role::FfnUp,
            () if has(&["ffn_gate"]) => Role::FfnGate,
            () if has(&["ffn_down"]) => Role::FfnDown,
            () => Role::Other,
        }
    }
}

/// Parts of names of matrices that are small, or that routers and recurrences cannot bear to lose bits of.
const KEPT: [&str; 17] = [
    "_norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_",
    "attn_rel_b.weight",
    "position_embd",
    "token_types",
    "sam.",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
];

/// Returns whether a tensor is a matrix that may change its type.
pub fn may_change(tensor: &Tensor) -> bool {
    // Axes of length 1 at the slow end are none.
    let n_axes = tensor.shape.len() - tensor.shape.iter().take_while(|&&n| n == 1).count();
    n_axes >= 2 && tensor.name.ends_with("weight") && !KEPT.iter().any(|part| tensor.name.contains(part))
}

/// Returns whether a matrix makes the logits: the output, or the embedding that is the output too.
pub fn makes_logits<'a>(name: &str, mut names: impl Iterator<Item = &'a str>) -> bool {
    match Role::of(name) {
        Role::Output => true,
        Role::Embedding => name == "token_embd.weight" && names.all(|other| Role::of(other) != Role::Output),
        _ => false,
    }
}

/// Returns the layers that tensors of these names are in, at least 1.
pub fn n_layer<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.filter_map(layer).max().map_or(1, |last| last.saturating_add(1))
}

/// Returns whether a matrix gets so few bits that they are worth something only where importances say which columns
/// matter: llama.cpp's rule.
pub fn needs_importance(file: &FileType, name: &str, dtype: WeightType) -> bool {
    use WeightType as T;
    match (Role::of(name), dtype) {
        (Role::Output | Role::Embedding, _) => false,
        (_, T::IQ1_S | T::IQ1_M | T::IQ2_XXS | T::IQ2_XS | T::IQ2_S | T::IQ3_XXS) => true,
        (_, T::Q2_K) => file.mix == Mix::Q2_K_S,
        _ => false,
    }
}

/// Returns the types of all tensors, in their order.
///
/// # Errors
/// An override whose pattern matches no matrix; metadata that cannot be read.
pub fn choose(
    file: &FileType,
    meta: &Metadata,
    tensors: &[Tensor],
    overrides: &[Override],
    has_importance: bool,
) -> Result<Vec<WeightType>> {
    let model = Model::read(meta, tensors, has_importance)?;
    for one in overrides {
        let is_used = tensors.iter().any(|t| may_change(t) && one.matches(t.name));
        ensure!(is_used, "failed to choose types: --tensor {}: the pattern matches no matrix of the model", one.text);
    }
    // The rules count tensors in order of layers, then of names.
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (layer(tensors[i].name), tensors[i].name));
    let n_values = tensors.iter().filter(|t| Role::of(t.name) == Role::AttentionV).count();
    let (mut i_values, mut i_up, mut i_gate, mut i_down) = (0, 0, 0, 0);
    let mut types: Vec<WeightType> = tensors.iter().map(|t| t.dtype).collect();
    for i in order {
        let tensor = &tensors[i];
        if !may_change(tensor) {
            continue;
        }
        let role = Role::of(tensor.name);
        let wanted = match overrides.iter().find(|one| one.matches(tensor.name)) {
            Some(one) => one.dtype,
            None if file.base.block_len() == 1 => file.base,
            None => {
                let n_before = match role {
                    Role::AttentionV => &mut i_values,
                    Role::FfnUp => &mut i_up,
                    Role::FfnGate => &mut i_gate,
                    Role::FfnDown => &mut i_down,
                    _ => &mut 0,
                };
                let at = match role {
                    Role::AttentionV => (*n_before, n_values),
                    // Experts of a layer are in one tensor, beside a shared expert's: the layer counts.
                    Role::FfnUp | Role::FfnGate | Role::FfnDown if model.n_expert > 1 && !file.mix.is_tiny() => {
                        (layer(tensor.name).unwrap_or(0), model.n_layer)
                    }
                    _ => (*n_before, model.n_layer),
                };
                *n_before += 1;
                rule(file, &model, tensor, role, at)
            }
        };
        // A matrix whose scale could not be told from a tensor that the model has anyway (Gemma 4's experts).
        let wanted = if wanted == WeightType::NVFP4 && !may_have_scale(tensor, tensors) { NO_NVFP4 } else { wanted };
        types[i] = fitting(wanted, tensor.shape[tensor.shape.len() - 1]);
    }
    Ok(types)
}

/// What is taken in the place of NVFP4 where that cannot be: as many bits.
const NO_NVFP4: WeightType = WeightType::IQ4_NL;

/// Returns the name of the tensor in which the scales of a matrix of NVFP4 stand; `None` where the matrix has no such
/// name.
pub fn scale_name(matrix: &str) -> Option<String> {
    Some(format!("{}.scale", matrix.strip_suffix(".weight")?))
}

/// Returns whether a matrix or stack can have scales in a tensor alongside it.
fn may_have_scale(tensor: &Tensor, tensors: &[Tensor]) -> bool {
    let is_free = |name: String| tensors.iter().all(|t| t.name != name);
    tensor.shape.len() <= 3 && scale_name(tensor.name).is_some_and(is_free)
}

/// Returns the layer of `blk.N.`.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Everything that a rule looks at: the mix, the model, and which matrix of its role it chooses for.
struct Case<'a> {
    mix: Mix,
    base: WeightType,
    model: &'a Model,
    /// The `i`th of `n` matrices of its role.
    i: usize,
    n: usize,
}

impl Case<'_> {
    /// Returns whether the matrix is among the first eighth of its role.
    fn is_early(&self) -> bool {
        self.i < self.n / 8
    }

    /// Returns whether the matrix is in the first or last eighth, or one of every three between.
    fn is_tender(&self) -> bool {
        let (i, n) = (self.i, self.n);
        i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
    }

    /// Returns whether at least four query heads share a key head, so that keys and values are small.
    fn shares_heads(&self) -> bool {
        self.model.n_group >= 4
    }
}

/// llama.cpp's choice for a matrix, the `i`th of `n` of its role.
fn rule(file: &FileType, model: &Model, tensor: &Tensor, role: Role, (i, n): (usize, usize)) -> WeightType {
    use WeightType as T;
    let case = &Case { mix: file.mix, base: file.base, model, i, n };
    let has_eight = model.n_expert == 8;
    match role {
        Role::Output => output_rule(case, tensor),
        Role::Embedding if model.is_tied => output_rule(case, tensor),
        _ if file.mix == Mix::MXFP4 => match tensor.shape {
            [n_expert, _, _] if *n_expert > 1 => T::MXFP4,
            _ => T::Q8_0,
        },
        Role::Embedding => match file.mix {
            Mix::NVFP4 => T::Q8_0,
            Mix::IQ1_S | Mix::IQ1_M | Mix::IQ2_XXS | Mix::IQ2_XS => T::Q2_K,
            Mix::IQ2_S | Mix::IQ2_M | Mix::IQ3_XXS => T::IQ3_S,
            Mix::TQ1_0 | Mix::TQ2_0 => T::Q4_K,
            _ => file.base,
        },
        _ if file.mix.is_tiny() => tiny_rule(case, role),
        Role::AttentionV => values_rule(case),
        Role::AttentionK if has_eight => T::Q8_0,
        Role::AttentionQ | Role::AttentionK => match file.mix {
            Mix::IQ3_XS => T::IQ3_XXS,
            Mix::IQ3_XXS => T::IQ2_S,
            _ => file.base,
        },
        Role::FfnUp | Role::FfnGate => match file.mix {
            Mix::IQ3_XS if !case.is_early() && i < 7 * n / 8 => T::IQ3_XXS,
            _ => file.base,
        },
        Role::FfnDown => down_rule(case),
        Role::AttentionOut if has_eight => match file.mix {
            Mix::Q2_K | Mix::Q3_K_S | Mix::Q3_K_M | Mix::IQ4_NL | Mix::IQ4_XS | Mix::Q4_K_S | Mix::Q4_K_M => T::Q5_K,
            Mix::IQ3_XXS | Mix::IQ3_XS | Mix::IQ3_S | Mix::IQ3_M => T::Q5_K,
            _ => file.base,
        },
        Role::AttentionOut => match file.mix {
            Mix::Q2_K => T::Q3_K,
            Mix::IQ3_XXS => T::IQ3_S,
            Mix::Q3_K_M | Mix::IQ3_M => T::Q4_K,
            Mix::Q3_K_L => T::Q5_K,
            _ => file.base,
        },
        Role::Other => file.base,
    }
}

/// Returns the choice for the matrix that makes the logits.
fn output_rule(case: &Case, tensor: &Tensor) -> WeightType {
    use WeightType as T;
    let n_cols = tensor.shape[tensor.shape.len() - 1];
    match case.mix {
        _ if !n_cols.is_multiple_of(case.base.block_len()) || case.base == T::Q8_0 => T::Q8_0,
        Mix::MXFP4 | Mix::NVFP4 => T::Q8_0,
        Mix::IQ3_XXS => T::Q5_K,
        mix if mix.is_tiny() => T::Q5_K,
        _ => T::Q6_K,
    }
}

/// Returns the choice for attention's values.
fn values_rule(case: &Case) -> WeightType {
    use WeightType as T;
    let model = case.model;
    let chosen = match case.mix {
        Mix::Q2_K if case.shares_heads() => T::Q4_K,
        Mix::Q2_K => T::Q3_K,
        Mix::Q2_K_S | Mix::IQ3_XXS | Mix::IQ3_XS | Mix::IQ3_S if case.shares_heads() => T::Q4_K,
        Mix::IQ3_XXS if !model.has_importance => T::IQ3_S,
        Mix::IQ3_M => T::Q4_K,
        Mix::Q3_K_M if case.i < 2 => T::Q5_K,
        Mix::Q3_K_M => T::Q4_K,
        Mix::Q3_K_L => T::Q5_K,
        Mix::IQ4_NL | Mix::IQ4_XS if case.shares_heads() => T::Q5_K,
        Mix::Q4_K_M | Mix::Q5_K_M if case.is_tender() => T::Q6_K,
        Mix::Q4_K_S if case.i < 4 => T::Q5_K,
        _ => case.base,
    };
    // Of 80 layers of Llama, whose heads share eightfold, and of 8 experts, this matrix is a small part.
    let is_llama_70b = model.arch == "llama" && model.n_layer == 80 && model.n_group > 1;
    match chosen {
        _ if model.n_expert == 8 => T::Q8_0,
        T::Q3_K | T::Q4_K if is_llama_70b => T::Q5_K,
        chosen => chosen,
    }
}

/// Returns the choice for `ffn_down`.
fn down_rule(case: &Case) -> WeightType {
    use WeightType as T;
    let has_importance = case.model.has_importance;
    match case.mix {
        Mix::Q2_K => T::Q3_K,
        Mix::Q2_K_S if case.is_early() => T::Q4_K,
        Mix::IQ3_XXS if !has_importance && case.is_early() => T::Q4_K,
        Mix::IQ3_XXS if !has_importance => T::Q3_K,
        Mix::IQ3_M if case.is_early() || case.model.n_expert == 8 && case.is_tender() => T::Q4_K,
        Mix::Q3_K_M if case.i < case.n / 16 => T::Q5_K,
        Mix::Q3_K_M => T::Q4_K,
        Mix::Q3_K_L => T::Q5_K,
        Mix::Q4_K_M | Mix::Q5_K_M if case.is_tender() => T::Q6_K,
        Mix::IQ4_NL | Mix::IQ4_XS if !has_importance && case.is_early() => T::Q5_K,
        Mix::Q4_K_S if case.is_early() => T::Q5_K,
        Mix::Q4_0 if has_importance && case.is_early() => T::Q4_1,
        Mix::Q5_0 if has_importance && case.is_early() => T::Q5_1,
        _ => case.base,
    }
}

/// Returns the choice for a matrix of the mixes of about two bits and less.
fn tiny_rule(case: &Case, role: Role) -> WeightType {
    use WeightType as T;
    let more = if matches!(case.mix, Mix::IQ2_S | Mix::IQ2_M) { T::IQ3_S } else { T::Q2_K };
    let n_expert = case.model.n_expert;
    match role {
        Role::AttentionV if case.shares_heads() || n_expert >= 4 => T::Q4_K,
        Role::AttentionV => more,
        Role::AttentionK if n_expert == 8 => T::Q4_K,
        Role::FfnDown if case.is_early() => more,
        Role::AttentionOut if n_expert == 8 => T::Q5_K,
        Role::AttentionOut if matches!(case.mix, Mix::IQ1_S | Mix::IQ1_M) => T::IQ2_XXS,
        Role::AttentionOut if more == T::IQ3_S => T::IQ3_S,
        _ => case.base,
    }
}

/// Returns a type whose blocks divide rows of `n_cols`: the wanted one, the nearest of 32-blocks, or F16.
pub fn fitting(wanted: WeightType, n_cols: usize) -> WeightType {
    use WeightType as T;
    if n_cols.is_multiple_of(wanted.block_len()) {
        return wanted;
    }
    let small = match wanted {
        T::Q2_K | T::Q3_K | T::TQ1_0 | T::TQ2_0 => T::Q4_0,
        T::Q4_K => T::Q5_0,
        T::Q5_K => T::Q5_1,
        T::Q6_K => T::Q8_0,
        T::IQ1_S | T::IQ1_M | T::IQ2_XXS | T::IQ2_XS | T::IQ2_S => T::IQ4_NL,
        T::IQ3_XXS | T::IQ3_S | T::IQ4_XS => T::IQ4_NL,
        T::NVFP4 => NO_NVFP4,
        _ => T::F16,
    };
    if n_cols.is_multiple_of(small.block_len()) { small } else { T::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::gguf::Writer;

    /// Layers of a Llama of 32 layers with 4 query heads a key head whose matrix has another type than most.
    fn layers_of(name: &str, matrix: &str, has_importance: bool) -> Vec<(usize, WeightType)> {
        let mut writer = Writer::new();
        writer.meta("general.architecture", "llama").meta("llama.block_count", 32u32);
        writer.meta("llama.attention.head_count", 32u32).meta("llama.attention.head_count_kv", 8u32);
        let mut file = Vec::new();
        writer.write(&mut file).expect("write");
        let meta = checkpoint::from_bytes("header", file).expect("open");
        let names: Vec<String> = (0..32)
            .flat_map(|l| ["attn_q", "attn_v", "attn_output", "ffn_down"].map(|m| format!("blk.{l}.{m}.weight")))
            .collect();
        let shape = [256, 4096];
        let tensor = |name| Tensor { name, shape: &shape, dtype: WeightType::BF16 };
        let tensors: Vec<Tensor> = names.iter().map(|name| tensor(name)).chain([tensor("output.weight")]).collect();
        let file = file_type(name).expect("a type");
        let types = choose(file, meta.meta(), &tensors, &[], has_importance).expect("types");
        let of_layer =
            |(t, &dtype): (&Tensor, &WeightType)| Some((layer(t.name)?, dtype)).filter(|_| t.name.contains(matrix));
        tensors.iter().zip(&types).filter_map(of_layer).filter(|(_, t)| *t != file.base).collect()
    }

    #[test]
    fn layers_that_get_more_bits() {
        use WeightType as T;
        let tender = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31];
        let all: Vec<usize> = (0..32).collect();
        let cases: [(&str, &str, bool, &[usize], WeightType); 13] = [
            ("Q4_K_M", "attn_v", false, &tender, T::Q6_K),
            ("Q4_K_M", "ffn_down", false, &tender, T::Q6_K),
            ("Q4_K_M", "attn_output", false, &[], T::Q4_K),
            ("Q4_K_S", "attn_v", false, &[0, 1, 2, 3], T::Q5_K),
            ("Q4_K_S", "ffn_down", false, &[0, 1, 2, 3], T::Q5_K),
            ("Q5_K_M", "ffn_down", true, &tender, T::Q6_K),
            ("Q2_K", "attn_v", false, &all, T::Q4_K),
            ("Q2_K", "ffn_down", false, &all, T::Q3_K),
            ("Q3_K_L", "attn_output", false, &all, T::Q5_K),
            ("IQ4_XS", "ffn_down", false, &[0, 1, 2, 3], T::Q5_K),
            ("IQ4_XS", "ffn_down", true, &[], T::IQ4_XS),
            ("Q4_0", "ffn_down", true, &[0, 1, 2, 3], T::Q4_1),
            ("NVFP4", "attn_v", false, &[], T::NVFP4),
        ];
        for (name, matrix, has_importance, layers, dtype) in cases {
            let wanted: Vec<(usize, WeightType)> = layers.iter().map(|&l| (l, dtype)).collect();
            assert_eq!(layers_of(name, matrix, has_importance), wanted, "{name} {matrix} {has_importance}");
        }
    }

    /// A model of tools/mix_listings.py, and the types that llama-quantize gave its matrices.
    #[derive(serde::Deserialize)]
    struct Listing {
        arch: String,
        n_layer: usize,
        n_head: u32,
        n_kv: u32,
        n_expert: u32,
        n_cols: usize,
        tied: bool,
        #[serde(rename = "in")]
        parts: Vec<String>,
        /// Mixes that want importances.
        refused: Vec<String>,
        /// By mix, and whether there were importances: `PART TYPE*N TYPE*N, PART ...`.
        files: std::collections::BTreeMap<String, String>,
    }

    impl Listing {
        fn header(&self) -> checkpoint::Checkpoint {
            let mut writer = Writer::new();
            let key = |name: &str| format!("{}.{name}", self.arch);
            writer.meta("general.architecture", self.arch.as_str());
            writer.meta(&key("block_count"), self.n_layer as u32);
            writer.meta(&key("attention.head_count"), self.n_head);
            writer.meta(&key("attention.head_count_kv"), self.n_kv);
            if self.n_expert > 0 {
                writer.meta(&key("expert_count"), self.n_expert);
            }
            let mut file = Vec::new();
            writer.write(&mut file).expect("write");
            checkpoint::from_bytes("header", file).expect("open")
        }

        /// Names and types by a file of the listing.
        fn matrices(&self, types: &str) -> Vec<(String, WeightType)> {
            let mut matrices = Vec::new();
            for part in types.split(", ") {
                let (part, runs) = part.split_once(' ').expect("a part and its types");
                let runs = runs.split(' ').map(|run| run.split_once('*').expect("a type and a count"));
                let types = runs.flat_map(|(t, n)| vec![weight_type(t).expect("a type"); n.parse().expect("a count")]);
                for (layer, dtype) in types.enumerate() {
                    let is_inside = self.parts.iter().any(|inside| inside == part);
                    let name = if is_inside { format!("blk.{layer}.{part}.weight") } else { format!("{part}.weight") };
                    matrices.push((name, dtype));
                }
            }
            matrices
        }
    }

    #[test]
    fn types_are_those_that_llama_quantize_gives_to_models_of_many_layers() {
        let listings: Vec<Listing> = serde_json::from_str(include_str!("../../tests/data/mixes.json")).expect("JSON");
        let mut n = 0;
        for listing in &listings {
            let header = listing.header();
            for (key, types) in &listing.files {
                let name = key.strip_suffix(" without");
                let (name, has_importance) = (name.unwrap_or(key), name.is_none());
                let matrices = listing.matrices(types);
                assert_eq!(matrices.iter().any(|(name, _)| name == "output.weight"), !listing.tied);
                let stack = [listing.n_expert as usize, 2, listing.n_cols];
                let shape = |name: &str| if name.contains("_exps") { &stack[..] } else { &stack[1..] };
                let tensor = |(name, _)| Tensor { name, shape: shape(name), dtype: WeightType::F16 };
                let tensors: Vec<Tensor> = matrices.iter().map(|(name, t)| tensor((name.as_str(), t))).collect();
                let file = file_type(name).expect("a type");
                let chosen = choose(file, header.meta(), &tensors, &[], has_importance).expect("types");
                for ((matrix, wanted), found) in matrices.iter().zip(chosen) {
                    let arch = &listing.arch;
                    assert_eq!(found, *wanted, "{arch} of {} layers, {key}: {matrix}", listing.n_layer);
                }
                let needs = matrices.iter().any(|(matrix, t)| needs_importance(file, matrix, *t));
                assert!(has_importance || !needs, "{} {key}", listing.arch);
                if has_importance && listing.n_cols % 256 == 0 {
                    assert_eq!(needs, listing.refused.iter().any(|refused| refused == name), "{} {key}", listing.arch);
                }
                n += 1;
            }
        }
        assert!(n > 150, "{n} files");
    }

    #[test]
    fn names_of_all_kinds() {
        for (name, id) in [("q4_k_m", 15), ("Q4_K", 15), ("mxfp4_moe", 38), ("bf16", 32), ("IQ4_xs", 30), ("nvfp4", 39)]
        {
            assert_eq!(file_type(name).expect("a type").id, id, "{name}");
        }
        for (name, id) in [("iq1_s", 24), ("IQ2_M", 29), ("IQ3_XS", 22), ("TQ1_0", 36), ("tq2_0", 37)] {
            assert_eq!(file_type(name).expect("a type").id, id, "{name}");
        }
        assert!(file_type("IQ5_S").expect_err("no such type").to_string().contains("Q4_K_M"));
    }
}
