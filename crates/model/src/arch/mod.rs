//! Architectures: one file each or one for a family, found by the name in `general.architecture`.
//!
//! An architecture reads its keys, looks up its tensors and writes plain ops; the passes fuse them. It knows no device
//! and reads no tensor's data.

mod afmoe;
mod arcee;
mod bailing;
mod bert;
mod cohere2;
mod deepseek2;
mod dots1;
mod dsa;
mod ernie4_5;
mod falcon_h1;
mod gated_delta;
mod gemma3;
mod gemma4;
mod glm4;
mod glm4moe;
mod gptoss;
mod granite;
mod hunyuan;
mod jamba;
mod keys;
mod kimi_linear;
mod laguna;
mod lfm2;
mod llama;
mod llama4;
mod mamba2;
mod mellum;
mod mimo2;
mod minimax;
mod minimax_m2;
mod modern_bert;
mod muse_glimmer;
mod nemotron_h;
mod nomic_bert;
mod olmo2;
mod parts;
mod phi3;
mod phimoe;
mod qwen;
mod qwen35;
mod qwen3next;
mod seed_oss;
mod shared_moe;
mod smollm3;
mod step3p5;
mod stretch;
mod windows;

pub use keys::unsaid_rope;

use checkpoint::{Checkpoint, Metadata};

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
    /// Models of this architecture, for `docs/models.md`.
    pub models: &'static str,
    /// Its code.
    pub build: Build,
}

/// All architectures. The table of `docs/models.md` and `moebius models --supported` are made of it.
#[rustfmt::skip]
pub const ARCHS: &[Arch] = &[
    Arch { gguf: &["llama"], folder: &["llama", "mistral", "mixtral"], build: llama::build,
        models: "Llama 2 to 3.3, Mistral, Mixtral, SmolLM2" },
    Arch { gguf: &["mistral3"], folder: &["ministral3"], build: llama::build_mistral3,
        models: "Ministral 3, Devstral 2, text; GGUF: Mistral Small 3.1 and 3.2 as well" },
    Arch { gguf: &["arcee"], folder: &["arcee"], build: arcee::build,
        models: "Arcee AFM-4.5B" },
    Arch { gguf: &["cohere2"], folder: &["cohere2"], build: cohere2::build,
        models: "Command R7B, Command A" },
    Arch { gguf: &["llama4"], folder: &["llama4", "llama4_text"], build: llama4::build,
        models: "Llama 4 Scout, Maverick, text" },
    Arch { gguf: &["qwen2"], folder: &["qwen2"], build: qwen::build_2,
        models: "Qwen2, Qwen2.5, dense" },
    Arch { gguf: &["qwen3"], folder: &["qwen3"], build: qwen::build_3,
        models: "Qwen3, dense (0.6B to 32B)" },
    Arch { gguf: &["qwen3moe"], folder: &["qwen3_moe"], build: qwen::build_3_moe,
        models: "Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder" },
    Arch { gguf: &["qwen3vl"], folder: &["qwen3_vl", "qwen3_vl_text"], build: qwen::build_3_vl,
        models: "Qwen3-VL, dense, text" },
    Arch { gguf: &["qwen3vlmoe"], folder: &["qwen3_vl_moe", "qwen3_vl_moe_text"], build: qwen::build_3_vl_moe,
        models: "Qwen3-VL-30B-A3B, 235B-A22B, text" },
    Arch { gguf: &["qwen3next"], folder: &["qwen3_next"], build: qwen3next::build,
        models: "Qwen3-Next-80B-A3B" },
    Arch { gguf: &["qwen35"], folder: &["qwen3_5", "qwen3_5_text"], build: qwen35::build_dense,
        models: "Qwen3.5, Qwen3.6, dense" },
    Arch { gguf: &["qwen35moe"], folder: &["qwen3_5_moe", "qwen3_5_moe_text"], build: qwen35::build_moe,
        models: "Qwen3.5/3.6-35B-A3B, Qwen3.5-397B-A17B" },
    Arch { gguf: &["deepseek2"], folder: &["deepseek_v3", "kimi_k2", "kimi_k25"], build: deepseek2::build_v3,
        models: "DeepSeek-V3, R1, V3.1, Cogito-V2, Kimi-K2 to K2.7 (text), Moonlight; GGUF: V2, GLM-4.7-Flash" },
    Arch { gguf: &[], folder: &["glm4_moe_lite"], build: deepseek2::build_glm,
        models: "GLM-4.7-Flash" },
    Arch { gguf: &["mistral4"], folder: &["mistral4"], build: deepseek2::build_mistral,
        models: "Mistral Small 4, text" },
    Arch { gguf: &[], folder: &["deepseek_v2"], build: deepseek2::build_v2,
        models: "DeepSeek-V2, V2-Lite" },
    Arch { gguf: &["deepseek32"], folder: &["deepseek_v32"], build: deepseek2::build_v32,
        models: "DeepSeek-V3.2, V3.2-Exp, V3.2-Speciale" },
    Arch { gguf: &["glm-dsa"], folder: &["glm_moe_dsa"], build: deepseek2::build_glm5,
        models: "GLM-5, GLM-5.1, GLM-5.2" },
    Arch { gguf: &["smollm3"], folder: &["smollm3"], build: smollm3::build,
        models: "SmolLM3" },
    Arch { gguf: &["seed_oss"], folder: &["seed_oss"], build: seed_oss::build,
        models: "Seed-OSS" },
    Arch { gguf: &["olmo2"], folder: &["olmo2", "olmo3"], build: olmo2::build,
        models: "OLMo 2, OLMo 3" },
    Arch { gguf: &["phi3"], folder: &["phi3"], build: phi3::build,
        models: "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini" },
    Arch { gguf: &["phimoe"], folder: &["phimoe"], build: phimoe::build,
        models: "Phi-3.5-MoE, Phi-mini-MoE" },
    Arch { gguf: &["granite"], folder: &["granite"], build: granite::build_dense,
        models: "Granite 3 and 4, dense" },
    Arch { gguf: &["granitemoe"], folder: &["granitemoe", "granitemoeshared"], build: granite::build_moe,
        models: "Granite 3 and 4 with experts" },
    Arch { gguf: &["granitehybrid"], folder: &["granitemoehybrid"], build: granite::build_hybrid,
        models: "Granite 4 H Tiny, Small, Micro, Nano" },
    Arch { gguf: &["nemotron_h_moe", "nemotron_h"], folder: &["nemotron_h"], build: nemotron_h::build,
        models: "Nemotron 3 Nano, Super; Nemotron Nano 2, Nemotron-H" },
    Arch { gguf: &["falcon-h1"], folder: &["falcon_h1"], build: falcon_h1::build,
        models: "Falcon-H1 (0.5B to 34B)" },
    Arch { gguf: &["jamba"], folder: &["jamba"], build: jamba::build,
        models: "Jamba 1.5, 1.6, 1.7, Reasoning 3B" },
    Arch { gguf: &["glm4"], folder: &["glm4"], build: glm4::build,
        models: "GLM-4-0414, GLM-Z1, dense" },
    Arch { gguf: &["glm4moe"], folder: &["glm4_moe"], build: glm4moe::build,
        models: "GLM-4.5, GLM-4.6, and their Air sizes" },
    Arch { gguf: &["gemma3"], folder: &["gemma3", "gemma3_text"], build: gemma3::build,
        models: "Gemma 3, text" },
    Arch { gguf: &["gemma4"], folder: &["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"],
        build: gemma4::build,
        models: "Gemma 4 E2B, E4B, 12B, 26B-A4B, 31B, text" },
    Arch { gguf: &["minimax-01"], folder: &["minimax", "minimax_text_01", "minimax_m1"], build: minimax::build,
        models: "MiniMax-Text-01, MiniMax-M1" },
    Arch { gguf: &["minimax-m2"], folder: &["minimax_m2"], build: minimax_m2::build,
        models: "MiniMax-M2, M2.1, M2.5, M2.7" },
    Arch { gguf: &["ernie4_5"], folder: &["ernie4_5"], build: ernie4_5::build_dense,
        models: "ERNIE 4.5, dense (0.3B)" },
    Arch { gguf: &["ernie4_5-moe"], folder: &["ernie4_5_moe"], build: ernie4_5::build_moe,
        models: "ERNIE-4.5-21B-A3B, 300B-A47B" },
    Arch { gguf: &["dots1"], folder: &["dots1"], build: dots1::build,
        models: "dots.llm1" },
    Arch { gguf: &["olmoe"], folder: &["olmoe"], build: qwen::build_olmoe,
        models: "OLMoE-1B-7B" },
    Arch { gguf: &["hunyuan-moe"], folder: &["hunyuan_v1_moe"], build: hunyuan::build_v1,
        models: "Hunyuan-A13B" },
    Arch { gguf: &["hy_v3"], folder: &["hy_v3"], build: hunyuan::build_v3,
        models: "Hy3" },
    Arch { gguf: &["afmoe"], folder: &["afmoe"], build: afmoe::build,
        models: "Trinity Nano, Mini, Large (Arcee)" },
    Arch { gguf: &["laguna"], folder: &["laguna"], build: laguna::build,
        models: "Laguna XS.2, S.2, M.1" },
    Arch { gguf: &["step35"], folder: &["step3p5", "step3p7"], build: step3p5::build,
        models: "Step-3.5-Flash, Step-3.7-Flash, text" },
    Arch { gguf: &["mimo2"], folder: &["mimo_v2_flash"], build: mimo2::build,
        models: "MiMo-V2-Flash" },
    Arch { gguf: &["muse-glimmer"], folder: &["muse_glimmer", "muse_glimmer_text"], build: muse_glimmer::build,
        models: "Muse Glimmer 30B, text" },
    Arch { gguf: &["mellum"], folder: &["mellum"], build: mellum::build,
        models: "Mellum 2" },
    Arch { gguf: &["lfm2"], folder: &["lfm2"], build: lfm2::build_dense,
        models: "LFM2, LFM2.5, dense (230M to 2.6B)" },
    Arch { gguf: &["lfm2moe"], folder: &["lfm2_moe"], build: lfm2::build_moe,
        models: "LFM2-8B-A1B, LFM2.5-8B-A1B, LFM2-24B-A2B" },
    Arch { gguf: &["kimi-linear"], folder: &["kimi_linear"], build: kimi_linear::build,
        models: "Kimi-Linear-48B-A3B" },
    Arch { gguf: &["bailingmoe3"], folder: &["bailing_hybrid"], build: bailing::build,
        models: "Ling 3.0 (tiny, Flash)" },
    Arch { gguf: &["bert"], folder: &["bert"], build: bert::build,
        models: "Embeddings: BGE small to large, E5, GTE, all-MiniLM; rerankers: ms-marco-MiniLM" },
    Arch { gguf: &[], folder: &["xlm-roberta", "roberta"], build: bert::build_roberta,
        models: "Embeddings: BGE-M3, multilingual E5; rerankers: BGE v2 M3" },
    Arch { gguf: &["gemma-embedding"], folder: &[], build: gemma3::build_embedding,
        models: "Embeddings: EmbeddingGemma (its folders are gemma3_text)" },
    Arch { gguf: &["modern-bert"], folder: &["modernbert"], build: modern_bert::build,
        models: "Embeddings: ModernBERT (GTE, ModernBERT Embed, Granite Embedding R2)" },
    Arch { gguf: &["nomic-bert"], folder: &["nomic_bert"], build: nomic_bert::build,
        models: "Embeddings: Nomic Embed Text v1, v1.5" },
    Arch { gguf: &["gpt-oss"], folder: &["gpt_oss"], build: gptoss::build,
        models: "gpt-oss-20B, 120B" },
];

/// Folders of models that see, whose text part has a separate name.
const WRAPPERS: &[&str] = &["mistral3"];

/// Returns the `model_type` of a folder's text model.
///
/// # Errors
/// It is no text.
pub fn model_type(config: &Metadata) -> Result<Option<&str>, checkpoint::Error> {
    match config.opt_str("model_type")? {
        Some(name) if WRAPPERS.contains(&name) => Ok(config.opt_str("text_config.model_type")?.or(Some(name))),
        name => Ok(name),
    }
}

/// Architectures, by GGUF's name, whose files may have a layer after the last that drafts, and the code that adds it.
const DRAFTING: &[(&str, Build)] = &[
    ("qwen3next", qwen3next::build_drafting),
    ("qwen35", qwen35::build_dense_drafting),
    ("qwen35moe", qwen35::build_moe_drafting),
    ("deepseek2", deepseek2::build_v3_drafting),
    ("glm4moe", glm4moe::build_drafting),
];

pub(crate) use stretch::stretch;
pub use stretch::{Stretch, StretchRule};

/// Builds the plan of a checkpoint, `drafts` with its draft head where it has one.
///
/// # Errors
/// As [`crate::build`].
pub(crate) fn build(checkpoint: &Checkpoint, drafts: bool) -> Result<ValidPlan, Error> {
    let meta = checkpoint.meta();
    let (name, names): (_, fn(&Arch) -> &'static [&'static str]) = match model_type(meta)? {
        Some(model_type) if meta.get(ARCHITECTURE).is_none() => (model_type, |arch| arch.folder),
        _ => (meta.str(ARCHITECTURE)?, |arch| arch.gguf),
    };
    match ARCHS.iter().find(|arch| names(arch).contains(&name)) {
        Some(arch) => {
            let drafting = DRAFTING.iter().find(|(of, _)| drafts && arch.gguf.first() == Some(of));
            let plan = drafting.map_or(arch.build, |(_, build)| *build)(checkpoint)?;
            ValidPlan::new(stretch::dynamic(checkpoint, plan)?)
        }
        None => Err(Error::Architecture {
            file: checkpoint.name().into(),
            arch: printable(name),
            nearest: nearest(name, ARCHS.iter().flat_map(names).copied()),
        }),
    }
}

/// Returns the name that is most similar to one that is none of them, if one is.
fn nearest(name: &str, names: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    const SIMILAR: f64 = 0.7;
    let plain = |name: &str| name.to_lowercase().replace(['-', '_'], "");
    // The similarity costs the product of both lengths.
    let name = plain(&name.chars().take(64).collect::<String>());
    names
        .map(|other| (strsim::normalized_damerau_levenshtein(&name, &plain(other)), other))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, other)| other)
}
