//! Where a tensor lies: architectures call tensors by GGUF's names, and this file finds them in any kind of file.
//!
//! GGUF files are looked up as they are. Folders (MLX, HF safetensors) name the modules of the original model code; a
//! table of aliases, one for all architectures and one of the architecture's own, says which module is meant, and
//! whether the rows stand in one tensor, in one for each expert, or fused with others. Knows no architecture and no
//! key.

use checkpoint::{Checkpoint, TensorInfo};

use crate::Error;
use crate::error::printable;
use crate::plan::{Slab, Source};
use quant::WeightType;

/// GGUF's name of a tensor inside its layer, and the names that folders have for it, most usual first.
///
/// GGUF's name comes without `.weight` or `.bias`, which is then the same in the folder; or with it, and then the
/// folder's name is complete. In the names of folders
/// * `*` is the number of the expert: the stack has one tensor each;
/// * `[0/2]` at the end means that every matrix of the tensor holds two matrices one above the other, and the first is
///   meant;
/// * `=` in front means that the name is of GGUF's form after all, for what converters have fused;
/// * `#` is the number of the layer, where `layers` does not name it;
/// * `^` in front means that the module is next to the layers that draft, not in one of them.
pub type Alias = (&'static str, &'static [&'static str]);

/// What most model code agrees on.
const COMMON: &[Alias] = &[
    ("token_embd", &["embed_tokens"]),
    ("output_norm", &["norm"]),
    ("output", &["lm_head"]),
    ("attn_norm", &["input_layernorm"]),
    ("attn_q", &["self_attn.q_proj"]),
    ("attn_k", &["self_attn.k_proj"]),
    ("attn_v", &["self_attn.v_proj"]),
    ("attn_output", &["self_attn.o_proj"]),
    ("attn_q_norm", &["self_attn.q_norm"]),
    ("attn_k_norm", &["self_attn.k_norm"]),
    ("ffn_norm", &["post_attention_layernorm"]),
    ("ffn_gate", &["mlp.gate_proj"]),
    ("ffn_up", &["mlp.up_proj"]),
    ("ffn_down", &["mlp.down_proj"]),
    ("ffn_gate_inp", &["mlp.gate"]),
    ("exp_probs_b.bias", &["mlp.gate.e_score_correction_bias"]),
    (
        "ffn_gate_exps",
        &[
            "=ffn_gate_up_exps[0/2]",
            "mlp.switch_mlp.gate_proj",
            "mlp.experts.*.gate_proj",
            "mlp.experts.gate_up_proj[0/2]",
            "mlp.switch_mlp.gate_up_proj[0/2]",
        ],
    ),
    (
        "ffn_up_exps",
        &[
            "=ffn_gate_up_exps[1/2]",
            "mlp.switch_mlp.up_proj",
            "mlp.experts.*.up_proj",
            "mlp.experts.gate_up_proj[1/2]",
            "mlp.switch_mlp.gate_up_proj[1/2]",
        ],
    ),
    ("ffn_down_exps", &["mlp.switch_mlp.down_proj", "mlp.experts.*.down_proj", "mlp.experts.down_proj"]),
    ("ffn_gate_shexp", &["mlp.shared_expert.gate_proj", "mlp.shared_experts.gate_proj"]),
    ("ffn_up_shexp", &["mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj"]),
    ("ffn_down_shexp", &["mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"]),
    ("ffn_gate_inp_shexp", &["mlp.shared_expert_gate"]),
    ("nextn.eh_proj", &["eh_proj", "^fc"]),
    ("nextn.enorm", &["enorm", "^pre_fc_norm_embedding"]),
    ("nextn.hnorm", &["hnorm", "^pre_fc_norm_hidden"]),
    ("nextn.shared_head_norm", &["shared_head.norm", "^norm"]),
    ("nextn.embed_tokens", &["embed_tokens", "^embed_tokens"]),
    ("nextn.shared_head_head", &["shared_head.head"]),
];

/// In front of the modules of the text model.
const ROOTS: &[&str] = &[
    "model.",
    "backbone.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "bert.",
    "roberta.",
    "",
];

/// In front of the layers that draft, where they are not numbered after the others (Qwen).
const FURTHER_ROOTS: &[&str] = &["mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."];

/// Parts of names that a text model does not need: towers for images and sound.
const OTHER_MODALITIES: &[&str] = &[
    "visual.",
    "vision_tower.",
    "vision_model.",
    "vision_embedder.",
    "multi_modal_projector.",
    "mm_projector.",
    "vit_large_projector.",
    "vision_adapter.",
    "vision_projection.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
];

/// In front of the modules of an image encoder.
const ENCODER_ROOTS: &[&str] = &["model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.", ""];

/// The tensors of a checkpoint under GGUF's names.
#[derive(Clone, Copy)]
pub struct Names<'a> {
    checkpoint: &'a Checkpoint,
    own: &'static [Alias],
    /// First of the layers that draft.
    further: usize,
}

/// A weight, found.
pub struct Found {
    /// Its type, of all slabs.
    pub dtype: WeightType,
    /// Where its rows lie.
    pub source: Source,
    /// See [`super::plan::WeightDecl::is_repacked`].
    pub is_repacked: bool,
}

/// One way to find a weight: a tensor, or one an expert, or a piece of one.
struct Place {
    /// Name of the tensor, `*` for the expert.
    tensor: String,
    /// `(i, n)`: piece `i` of `n`.
    piece: (usize, usize),
}

impl<'a> Names<'a> {
    /// Returns the tensors of a checkpoint; `own` aliases go before the common ones.
    pub fn new(checkpoint: &'a Checkpoint, own: &'static [Alias]) -> Self {
        Self { checkpoint, own, further: usize::MAX }
    }

    /// Returns the same for a model of `n_layer` layers: those after them draft.
    pub fn further_from(self, n_layer: usize) -> Self {
        Self { further: n_layer, ..self }
    }

    /// Returns the checkpoint.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Returns whether the checkpoint has a tensor for this name.
    pub fn has(&self, name: &str) -> bool {
        self.place(name).is_some()
    }

    /// Returns the one tensor of this name; `None` as well where it is made of several.
    pub fn tensor(&self, name: &str) -> Option<&'a TensorInfo> {
        let place = self.place(name)?;
        if place.piece == (0, 1) { self.checkpoint.tensor(&place.tensor) } else { None }
    }

    /// Finds the rows of a weight of this shape; a missing tensor or another shape is an error.
    ///
    /// Axes of length 1 are taken as they come: some writers drop them.
    pub fn find(&self, name: &str, shape: &[usize]) -> Result<Found, Error> {
        let Some(place) = self.place(name) else {
            return Err(self.error(name, format!("is missing, expected {shape:?}")));
        };
        if place.tensor.contains('*') {
            return self.per_expert(&place, shape);
        }
        let info = self.whole(&place.tensor, &place.fused(shape))?;
        let (i, n) = place.piece;
        let source = match (n, shape) {
            (1, _) => Source::Tensor(place.tensor),
            (_, &[.., rows, _]) => {
                let n_stack = if shape.len() == 3 { shape[0] } else { 1 };
                let slab = |s: usize| Slab { tensor: place.tensor.clone(), first_row: (s * n + i) * rows };
                Source::Slabs((0..n_stack).map(slab).collect())
            }
            _ => return Err(self.error(&place.tensor, format!("is no part of a matrix {shape:?}"))),
        };
        Ok(Found { dtype: info.dtype, source, is_repacked: self.is_repacked(info) })
    }

    /// Returns a stack of experts that have a tensor each, all of one type.
    fn per_expert(&self, place: &Place, shape: &[usize]) -> Result<Found, Error> {
        let &[n_expert, n, k] = shape else {
            return Err(self.error(&place.tensor, format!("is no stack of experts {shape:?}")));
        };
        let (mut dtype, mut is_repacked) = (None, false);
        let slab = |expert: usize| {
            let tensor = place.tensor.replace('*', &expert.to_string());
            let info = self.whole(&tensor, &[n, k])?;
            let first = *dtype.get_or_insert(info.dtype);
            if info.dtype != first {
                return Err(self.error(&tensor, format!("has type {}, expert 0 has {first}", info.dtype)));
            }
            is_repacked |= self.is_repacked(info);
            Ok(Slab { tensor, first_row: 0 })
        };
        let slabs = (0..n_expert).map(slab).collect::<Result<Vec<_>, _>>()?;
        match dtype {
            Some(dtype) => Ok(Found { dtype, source: Source::Slabs(slabs), is_repacked }),
            None => Err(self.error(&place.tensor, "is a stack of no experts".into())),
        }
    }

    fn is_repacked(&self, info: &TensorInfo) -> bool {
        self.checkpoint.files()[info.file].is_repacked()
    }

    /// Returns a tensor of this shape.
    fn whole(&self, tensor: &str, shape: &[usize]) -> Result<&'a TensorInfo, Error> {
        match self.checkpoint.find(tensor)? {
            None => Err(self.error(tensor, format!("is missing, expected {shape:?}"))),
            Some(info) if !squeeze(&info.shape).eq(squeeze(shape)) => {
                Err(self.error(tensor, format!("has shape {:?}, expected {shape:?}", info.shape)))
            }
            Some(info) => Ok(info),
        }
    }

    /// Returns the place of a tensor of an image encoder, `v.blk.0.attn_qkv.weight` or `mm.0.weight`. `#` in an alias
    /// is the number after `blk` or `deepstack`.
    fn encoder_place(&self, name: &str) -> Option<Place> {
        let (stem, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
        let numbered = ["v.blk.", "v.deepstack."].iter().find_map(|start| Some((start, stem.strip_prefix(start)?)));
        let (stem, number) = match numbered.and_then(|(start, rest)| Some((start, rest.split_once('.')?))) {
            Some((start, (number, rest))) => (format!("{start}#.{rest}"), number),
            None => (stem.to_string(), ""),
        };
        let aliases = self.own.iter().filter(|(of, _)| *of == stem || *of == name).flat_map(|&(of, aliases)| {
            let end = if of == name || suffix.is_empty() { String::new() } else { format!(".{suffix}") };
            aliases.iter().map(move |alias| format!("{}{end}", alias.replace('#', number)))
        });
        let found = aliases.flat_map(|module| ENCODER_ROOTS.iter().map(move |root| format!("{root}{module}")));
        let mut found = std::iter::once(name.to_string()).chain(found);
        found.find(|tensor| self.checkpoint.has(tensor)).map(|tensor| Place { tensor, piece: (0, 1) })
    }

    /// Returns the first place in the checkpoint that a name may mean.
    fn place(&self, name: &str) -> Option<Place> {
        if name.starts_with("v.") || name.starts_with("mm.") {
            return self.encoder_place(name);
        }
        let is_there = |place: &Place| self.checkpoint.has(&place.tensor.replace('*', "0"));
        let (layer, rest) = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, rest)) => (Some(layer), rest),
            None => (None, name),
        };
        let further = layer.and_then(|layer| layer.parse::<usize>().ok()?.checked_sub(self.further));
        let (stem, suffix) = rest.rsplit_once('.').unwrap_or((rest, ""));
        // A tensor of an unsupported type is found too: reading it is the error.
        if self.checkpoint.has(name) && !self.is_fused(stem) {
            return Some(Place { tensor: name.into(), piece: (0, 1) });
        }
        for &(of, aliases) in self.own.iter().chain(COMMON) {
            let suffixes: &[&str] = match () {
                () if of == rest => &[""],
                // Stacks of experts in HF files are parameters of their module, not modules with a weight.
                () if of == stem && suffix == "weight" => &["weight", ""],
                () if of == stem => &[suffix],
                () => continue,
            };
            for (alias, suffix) in aliases.iter().flat_map(|&alias| suffixes.iter().map(move |&s| (alias, s))) {
                if let Some(place) = Place::all(alias, layer, further, suffix).find(is_there) {
                    return Some(place);
                }
            }
        }
        None
    }

    /// Returns whether the tensor of this name holds others too, as the architecture's own aliases say.
    fn is_fused(&self, stem: &str) -> bool {
        let own = self.own.iter().filter(|(of, _)| *of == stem).flat_map(|(_, aliases)| *aliases);
        own.filter_map(|alias| alias.strip_prefix('=')?.split_once('[')).any(|(module, _)| module == stem)
    }

    /// Returns whether the tensor is of no use to a text model of any architecture that does not draft.
    pub fn is_other_modality(name: &str) -> bool {
        name.starts_with("mtp.")
            || name.contains(".mtp.")
            || name.contains(".mtp_")
            || name.ends_with("rotary_emb.inv_freq")
            // Scales of keys and values in FP8: of a cache that is kept otherwise.
            || name.ends_with(".k_scale")
            || name.ends_with(".v_scale")
            || OTHER_MODALITIES.iter().any(|part| name.contains(part))
    }

    /// Returns whether the tensor is of an image encoder, or of what brings its features to the width of the text
    /// model.
    pub fn is_of_encoder(name: &str) -> bool {
        const PARTS: [&str; 3] = ["visual.", "vision_tower.", "embed_vision."];
        name.starts_with("v.") || name.starts_with("mm.") || PARTS.iter().any(|part| name.contains(part))
    }

    /// Returns the layer that a tensor of any kind of file belongs to.
    pub fn layer(name: &str) -> Option<usize> {
        let mut parts = name.split('.');
        parts.find(|&part| part == "blk" || part == "layers")?;
        parts.next()?.parse().ok()
    }

    /// Returns an error about a tensor of this checkpoint.
    pub fn error(&self, tensor: &str, what: String) -> Error {
        Error::Tensor { file: self.checkpoint.name().into(), tensor: printable(tensor), what }
    }
}

impl Place {
    /// The names that an alias has in files of all kinds.
    /// `further` is the number of the layer among those that draft, if it is one.
    fn all<'s>(
        alias: &'s str,
        layer: Option<&'s str>,
        further: Option<usize>,
        suffix: &'s str,
    ) -> impl Iterator<Item = Place> + 's {
        let (module, piece) = match alias.strip_suffix(']').and_then(|a| a.split_once('[')) {
            Some((module, "0/2")) => (module, (0, 2)),
            Some((module, _)) => (module, (1, 2)),
            None => (alias, (0, 1)),
        };
        let end = if suffix.is_empty() { String::new() } else { format!(".{suffix}") };
        let gguf = module.strip_prefix('=').map(|module| match layer {
            Some(layer) => format!("blk.{layer}.{module}{end}"),
            None => format!("{module}{end}"),
        });
        let apart = module.strip_prefix('^');
        let module = apart.unwrap_or(module);
        let has_number = module.contains('#');
        let module = module.replace('#', layer.unwrap_or_default());
        let layers = |n: String| format!("layers.{n}.");
        let own = further.map(|n| if apart.is_some() { String::new() } else { layers(n.to_string()) });
        let layer = layer.filter(|_| !has_number).map(|layer| layers(layer.into())).unwrap_or_default();
        let roots: &[&str] = if gguf.is_some() || apart.is_some() { &[] } else { ROOTS };
        let further_roots: &[&str] = if gguf.is_some() || own.is_none() { &[] } else { FURTHER_ROOTS };
        let folder = roots.iter().map(move |root| (root, layer.clone()));
        let folder = folder.chain(further_roots.iter().map(move |root| (root, own.clone().unwrap_or_default())));
        let folder = folder.map(move |(root, layer)| format!("{root}{layer}{module}{end}"));
        gguf.into_iter().chain(folder).map(move |tensor| Place { tensor, piece })
    }

    /// Returns the shape of the tensor that holds a matrix or stack of this shape as one of its pieces.
    fn fused(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        if let [.., rows, _] = shape.as_mut_slice() {
            *rows *= self.piece.1;
        }
        shape
    }
}

fn squeeze(shape: &[usize]) -> impl Iterator<Item = &usize> {
    shape.iter().filter(|&&axis| axis != 1)
}
