//! The kernels' sources, embedded, and which module an op needs: a source compiled for a weight type or for dimensions.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use backend::{CacheType, KvType};
use model::plan::CacheDecl;
use quant::WeightType;

use crate::quant_headers;

/// Headers besides those of weight types, by the names that sources include them by.
pub const HEADERS: &[(&str, &str)] = &[
    ("cuda/args.h", include_str!("../../kernels/cuda/args.h")),
    ("cuda/async.h", include_str!("../../kernels/cuda/async.h")),
    ("cuda/attend.h", include_str!("../../kernels/cuda/attend.h")),
    ("cuda/batch.h", include_str!("../../kernels/cuda/batch.h")),
    ("cuda/batch_order.h", include_str!("../../kernels/cuda/batch_order.h")),
    ("cuda/best.h", include_str!("../../kernels/cuda/best.h")),
    ("cuda/choose.h", include_str!("../../kernels/cuda/choose.h")),
    ("cuda/columns.h", include_str!("../../kernels/cuda/columns.h")),
    ("cuda/common.h", include_str!("../../kernels/cuda/common.h")),
    ("cuda/few.h", include_str!("../../kernels/cuda/few.h")),
    ("cuda/head.h", include_str!("../../kernels/cuda/head.h")),
    ("cuda/kv.h", include_str!("../../kernels/cuda/kv.h")),
    ("cuda/kv_blocks.h", include_str!("../../kernels/cuda/kv_blocks.h")),
    ("cuda/linear.h", include_str!("../../kernels/cuda/linear.h")),
    ("cuda/load8.h", include_str!("../../kernels/cuda/load8.h")),
    ("cuda/mma.h", include_str!("../../kernels/cuda/mma.h")),
    ("cuda/pack.h", include_str!("../../kernels/cuda/pack.h")),
    ("cuda/q4_k_batch.h", include_str!("../../kernels/cuda/q4_k_batch.h")),
    ("cuda/batch_of.h", include_str!("../../kernels/cuda/batch_of.h")),
    ("cuda/q4_k_wide.h", include_str!("../../kernels/cuda/q4_k_wide.h")),
    ("cuda/route.h", include_str!("../../kernels/cuda/route.h")),
    ("cuda/shares.h", include_str!("../../kernels/cuda/shares.h")),
    ("cuda/tile.h", include_str!("../../kernels/cuda/tile.h")),
    ("cuda/vec.h", include_str!("../../kernels/cuda/vec.h")),
    ("cuda/wgmma.h", include_str!("../../kernels/cuda/wgmma.h")),
    ("cuda/wide.h", include_str!("../../kernels/cuda/wide.h")),
    ("cuda/experts_bytes.h", include_str!("../../kernels/cuda/experts_bytes.h")),
    ("cuda/wide_queue.h", include_str!("../../kernels/cuda/wide_queue.h")),
    ("cuda/wide_staged.h", include_str!("../../kernels/cuda/wide_staged.h")),
];

macro_rules! sources {
    ($($name:ident = $file:literal;)*) => { $(
        #[doc = concat!("`kernels/cuda/", $file, "`.")]
        pub const $name: Source = Source { file: $file, text: include_str!(concat!("../../kernels/cuda/", $file)) };
    )* };
}

/// A source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    file: &'static str,
    text: &'static str,
}

sources! {
    ALL_REDUCE = "all_reduce.cu";
    ATTEND = "attend.cu";
    ATTEND_LONG = "attend_long.cu";
    ATTENTION = "attention.cu";
    ATTENTION_CHOSEN = "attention_chosen.cu";
    ATTENTION_WIDE = "attention_wide.cu";
    CAUSAL_CONV = "causal_conv.cu";
    CHOOSE = "choose.cu";
    COMBINE = "combine.cu";
    DELTA_CHUNKS = "delta_chunks.cu";
    DELTA_IN = "delta_in.cu";
    DELTA_NET = "delta_net.cu";
    ELEMENTWISE = "elementwise.cu";
    EMBED = "embed.cu";
    EXPERTS = "experts.cu";
    EXPERTS_BATCH = "experts_batch.cu";
    EXPERTS_DOWN = "experts_down.cu";
    EXPERT_LISTS = "expert_lists.cu";
    EXPERTS_WIDE = "experts_wide.cu";
    FEW_DOWN = "few_down.cu";
    FEW_EXPERTS = "few_experts.cu";
    FEW_LINEAR = "few_linear.cu";
    FEW_PAIRS = "few_pairs.cu";
    FEW_ROUTED = "few_routed.cu";
    GATED_LINEAR = "gated_linear.cu";
    GATED_LINEAR_BATCH = "gated_linear_batch.cu";
    GATED_LINEAR_WIDE = "gated_linear_wide.cu";
    HEAD_LINEAR = "head_linear.cu";
    HOT = "hot.cu";
    KV_APPEND = "kv_append.cu";
    KV_WIDEN = "kv_widen.cu";
    LATENT_OUT = "latent_out.cu";
    LATENT_Q = "latent_q.cu";
    LINEAR = "linear.cu";
    LINEAR_BATCH = "linear_batch.cu";
    LINEAR_PAIR = "linear_pair.cu";
    LINEAR_WIDE = "linear_wide.cu";
    LOGITS = "logits.cu";
    NORM = "norm.cu";
    PACK = "pack.cu";
    PICK = "pick.cu";
    QKV = "qkv.cu";
    ROPE = "rope.cu";
    ROUTE = "route.cu";
    ROUTER = "router.cu";
}

/// The source of a product's kernels for many rows, on devices that have them (`wide.rs`).
pub fn wide(source: Source) -> Option<Source> {
    [(LINEAR, LINEAR_WIDE), (GATED_LINEAR, GATED_LINEAR_WIDE), (EXPERTS, EXPERTS_WIDE)]
        .into_iter()
        .find_map(|(narrow, wide)| (narrow == source).then_some(wide))
}

/// The source of a product's kernels for 9 to 64 rows (`batch.rs`), where the type has them.
pub fn batch(source: Source, w: WeightType) -> Option<Source> {
    let sources = [(LINEAR, LINEAR_BATCH), (GATED_LINEAR, GATED_LINEAR_BATCH), (EXPERTS, EXPERTS_BATCH)];
    let found = sources.into_iter().find_map(|(narrow, batch)| (narrow == source).then_some(batch));
    found.filter(|_| super::batch::fits(w))
}

/// The texts to compile: the embedded ones, or those of a folder like `kernels`.
pub struct Texts {
    folder: Option<PathBuf>,
    /// Headers by the names that sources include them by.
    pub headers: Vec<(&'static str, Cow<'static, str>)>,
    headers_hash: OnceLock<[u64; 2]>,
}

impl Texts {
    /// Of a folder, where there is one. A file that it lacks is the embedded one.
    pub fn new(folder: Option<&Path>) -> Texts {
        let text = |name: &str, text| match folder.and_then(|folder| std::fs::read_to_string(folder.join(name)).ok()) {
            Some(own) => Cow::Owned(own),
            None => Cow::Borrowed(text),
        };
        let headers =
            HEADERS.iter().chain(quant_headers::ALL).map(|&(name, embedded)| (name, text(name, embedded))).collect();
        Texts { folder: folder.map(Path::to_path_buf), headers, headers_hash: OnceLock::new() }
    }

    /// The headers' hash, which `hash` computes the first time.
    pub fn headers_hash(&self, hash: impl FnOnce(&[(&'static str, Cow<'static, str>)]) -> [u64; 2]) -> [u64; 2] {
        *self.headers_hash.get_or_init(|| hash(&self.headers))
    }

    /// The source of a module.
    pub fn source(&self, key: &Key) -> Cow<'static, str> {
        let own = self.folder.as_ref().and_then(|f| std::fs::read_to_string(f.join("cuda").join(key.file)).ok());
        own.map_or(Cow::Borrowed(key.source), Cow::Owned)
    }
}

/// A module: a source and what it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Name of the source file.
    pub file: &'static str,
    /// The source.
    pub source: &'static str,
    /// `NAME=VALUE` each.
    pub defines: Vec<String>,
}

impl Key {
    fn new(source: Source, defines: Vec<String>) -> Key {
        Key { file: source.file, source: source.text, defines }
    }

    /// A source without variants.
    pub fn plain(source: Source) -> Key {
        Key::new(source, Vec::new())
    }

    /// A source for a weight type.
    pub fn typed(source: Source, w: WeightType) -> Key {
        let mut defines = vec![format!("WEIGHT_HEADER=\"{}\"", quant_headers::name(w))];
        defines.extend(quant_headers::defines(w).into_iter().map(|(name, value)| format!("{name}={value}")));
        Key::new(source, defines)
    }

    /// A source for the elements of a cache.
    pub fn cached(source: Source, is_f16: bool) -> Key {
        Key::new(source, vec![format!("KV_F16={}", u32::from(is_f16))])
    }

    /// The choice of positions by index keys of `d` numbers.
    pub fn choose(d: usize, types: CacheType) -> Key {
        let is_blocks = u32::from(types.k.block().is_some());
        let mut key = Key::cached(CHOOSE, types.k != KvType::F32);
        key.defines.extend([format!("D={d}"), format!("K_BLOCKS={is_blocks}")]);
        key
    }

    /// Attention for a cache and `heads` query heads of a block.
    pub fn attention(source: Source, cache: &CacheDecl, is_f16: bool, heads: usize) -> Key {
        let defines = [
            ("KV_F16", usize::from(is_f16)),
            ("D_K", cache.d_k),
            ("D_V", cache.d_v),
            ("V_IN_K", usize::from(cache.v_in_k)),
            ("HEADS", heads),
        ];
        Key::new(source, defines.map(|(name, value)| format!("{name}={value}")).to_vec())
    }

    /// A source for two weight types, neither of them affine.
    pub fn pair(source: Source, w: WeightType, other: WeightType) -> Key {
        let mut key = Key::typed(source, w);
        key.defines.push(format!("WEIGHT_HEADER_B=\"{}\"", quant_headers::name(other)));
        key.defines.push(format!("WEIGHT_B={}", other.name()));
        key
    }

    /// What comes before attention over latents: for the type of the heads' matrices, the elements of the cache and the
    /// type of the product that makes the queries, where it goes with the rest.
    pub fn latent(w: WeightType, is_f16: bool, product: Option<WeightType>) -> Key {
        let mut key = match product {
            Some(product) => Key::pair(LATENT_Q, w, product),
            None => Key::typed(LATENT_Q, w),
        };
        key.defines.push(format!("KV_F16={}", u32::from(is_f16)));
        key
    }

    /// A source for a weight type and a router's number of experts.
    pub fn routed(source: Source, w: WeightType, n_expert: usize) -> Key {
        let mut key = Key::typed(source, w);
        key.defines.push(format!("N_EXPERT={n_expert}"));
        key
    }

    /// Attention of single tokens over heads of `d` numbers, `heads` query heads of a block, after short contexts.
    pub fn attend(d: usize, heads: usize) -> Key {
        Key::new(ATTEND, vec![format!("D={d}"), format!("HEADS={heads}")])
    }

    /// The same after long contexts, and where a cache has blocks; blocks of `warps` warps.
    pub fn attend_long(d: usize, heads: usize, types: CacheType, warps: usize) -> Key {
        let blocks = [("K_BLOCKS", types.k), ("V_BLOCKS", types.v)];
        let blocks = blocks.map(|(name, t)| format!("{name}={}", u32::from(t.block().is_some())));
        let dims = [format!("D={d}"), format!("HEADS={heads}"), format!("WORKERS={warps}")];
        Key::new(ATTEND_LONG, [&dims[..], &blocks[..]].concat())
    }

    /// A source for one number.
    pub fn sized(source: Source, name: &str, value: usize) -> Key {
        Key::new(source, vec![format!("{name}={value}")])
    }
}
