//! Architectures: one file each or one for a family, found by the name in `general.architecture`.
//!
//! An architecture reads its keys, looks up its tensors and writes plain ops; the passes fuse them. It knows no device
//! and reads no tensor's data.

mod deepseek2;
mod gated_delta;
mod gemma3;
mod gemma4;
mod glm4moe;
mod gptoss;
mod keys;
mod llama;
mod parts;
mod qwen;
mod qwen35;
mod qwen3next;
mod shared_moe;
mod windows;

use checkpoint::Checkpoint;

use crate::Error;
use crate::error::printable;
use crate::plan::{Plan, ValidPlan};

/// The key of a GGUF file's architecture; folders lack it and have `model_type`.
const ARCHITECTURE: &str = "general.architecture";

/// Turns a checkpoint's header into plain ops.
pub type Build = fn(&Checkpoint) -> Result<Plan, Error>;

/// An architecture: the names that files give it, and its code.
pub struct Arch {
    /// `general.architecture` of GGUF files.
    pub gguf: &'static [&'static str],
    /// `model_type` of config.json.
    pub folder: &'static [&'static str],
    /// Models of this architecture, for the README.
    pub models: &'static str,
    /// Its code.
    pub build: Build,
}

/// All architectures. The README's table is made of it.
#[rustfmt::skip]
pub const ARCHS: &[Arch] = &[
    Arch { gguf: &["llama"], folder: &["llama", "mistral", "mixtral"], build: llama::build,
        models: "Llama 2 to 3.3, Mistral, Mixtral, SmolLM2" },
    Arch { gguf: &["qwen2"], folder: &["qwen2"], build: qwen::build_2,
        models: "Qwen2, Qwen2.5, dense" },
    Arch { gguf: &["qwen3"], folder: &["qwen3"], build: qwen::build_3,
        models: "Qwen3, dense (0.6B to 32B)" },
    Arch { gguf: &["qwen3moe"], folder: &["qwen3_moe"], build: qwen::build_3_moe,
        models: "Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder" },
    Arch { gguf: &["qwen3next"], folder: &["qwen3_next"], build: qwen3next::build,
        models: "Qwen3-Next-80B-A3B" },
    Arch { gguf: &["qwen35"], folder: &["qwen3_5", "qwen3_5_text"], build: qwen35::build_dense,
        models: "Qwen3.5, Qwen3.6, dense" },
    Arch { gguf: &["qwen35moe"], folder: &["qwen3_5_moe", "qwen3_5_moe_text"], build: qwen35::build_moe,
        models: "Qwen3.5/3.6-35B-A3B, Qwen3.5-397B-A17B" },
    Arch { gguf: &["deepseek2"], folder: &["deepseek_v3", "kimi_k2"], build: deepseek2::build_v3,
        models: "DeepSeek-V3, R1, V3.1, Cogito-V2, Kimi-K2, Moonlight; GGUF: V2 as well" },
    Arch { gguf: &[], folder: &["deepseek_v2"], build: deepseek2::build_v2,
        models: "DeepSeek-V2, V2-Lite" },
    Arch { gguf: &["glm4moe"], folder: &["glm4_moe"], build: glm4moe::build,
        models: "GLM-4.5, GLM-4.6, and their Air sizes" },
    Arch { gguf: &["gemma3"], folder: &["gemma3", "gemma3_text"], build: gemma3::build,
        models: "Gemma 3, text" },
    Arch { gguf: &["gemma4"], folder: &["gemma4", "gemma4_text"], build: gemma4::build,
        models: "Gemma 4 26B-A4B, text" },
    Arch { gguf: &["gpt-oss"], folder: &["gpt_oss"], build: gptoss::build,
        models: "gpt-oss-20B, 120B" },
];

/// Builds the plan of a checkpoint.
///
/// # Errors
/// As [`crate::build`].
pub(crate) fn build(checkpoint: &Checkpoint) -> Result<ValidPlan, Error> {
    let meta = checkpoint.meta();
    let (name, names): (_, fn(&Arch) -> &'static [&'static str]) = match meta.opt_str("model_type")? {
        Some(model_type) if meta.get(ARCHITECTURE).is_none() => (model_type, |arch| arch.folder),
        _ => (meta.str(ARCHITECTURE)?, |arch| arch.gguf),
    };
    match ARCHS.iter().find(|arch| names(arch).contains(&name)) {
        Some(arch) => (arch.build)(checkpoint).and_then(ValidPlan::new),
        None => Err(Error::Architecture {
            file: checkpoint.name().into(),
            arch: printable(name),
            supported: ARCHS.iter().flat_map(names).copied().collect::<Vec<_>>().join(", "),
        }),
    }
}
