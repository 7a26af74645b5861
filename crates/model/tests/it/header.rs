//! Makes the headers of tiny models; the weights are zeros.

use checkpoint::gguf::Writer;
use checkpoint::{Checkpoint, Value};
use quant::WeightType;

/// Keys and tensors of a model, to be changed before it is opened.
pub struct Header {
    keys: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<usize>, WeightType)>,
}

pub const D_MODEL: usize = 256;
pub const D_FF: usize = 512;
pub const N_VOCAB: usize = 96;
pub const N_HEAD: usize = 4;
pub const N_KV: usize = 2;
pub const D_HEAD: usize = 32;

impl Header {
    /// Names its architecture and has nothing else.
    pub fn empty(arch: &str) -> Self {
        Self { keys: vec![("general.architecture".into(), arch.into())], tensors: Vec::new() }
    }

    fn base(arch: &str, n_layer: u32) -> Self {
        let mut h = Self::empty(arch);
        for (key, n) in [
            ("block_count", n_layer),
            ("context_length", 4096),
            ("embedding_length", D_MODEL as u32),
            ("attention.head_count", N_HEAD as u32),
            ("attention.head_count_kv", N_KV as u32),
            ("attention.key_length", D_HEAD as u32),
            ("attention.value_length", D_HEAD as u32),
        ] {
            h.set(&format!("{arch}.{key}"), n);
        }
        h.set(&format!("{arch}.rope.freq_base"), 10000f32);
        h.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32);
        h.tensor("token_embd.weight", &[N_VOCAB, D_MODEL], WeightType::Q4_K);
        h.tensor("output_norm.weight", &[D_MODEL], WeightType::F32);
        for i in 0..n_layer {
            h.tensor(&format!("blk.{i}.attn_norm.weight"), &[D_MODEL], WeightType::F32);
            h.tensor(&format!("blk.{i}.ffn_norm.weight"), &[D_MODEL], WeightType::F32);
            // Like llama-quantize, with a better type for some layers.
            let v = if i % 4 == 1 { WeightType::Q6_K } else { WeightType::Q4_K };
            let (q_width, kv_width) = (N_HEAD * D_HEAD, N_KV * D_HEAD);
            h.tensor(&format!("blk.{i}.attn_q.weight"), &[q_width, D_MODEL], WeightType::Q4_K);
            h.tensor(&format!("blk.{i}.attn_k.weight"), &[kv_width, D_MODEL], WeightType::Q4_K);
            h.tensor(&format!("blk.{i}.attn_v.weight"), &[kv_width, D_MODEL], v);
            h.tensor(&format!("blk.{i}.attn_output.weight"), &[D_MODEL, q_width], WeightType::Q8_0);
        }
        h
    }

    fn qk_norm(mut self, n_layer: u32) -> Self {
        for i in 0..n_layer {
            h_norms(&mut self, i);
        }
        self
    }

    fn dense(mut self, arch: &str, n_layer: u32) -> Self {
        self.set(&format!("{arch}.feed_forward_length"), D_FF as u32);
        for i in 0..n_layer {
            self.tensor(&format!("blk.{i}.ffn_gate.weight"), &[D_FF, D_MODEL], WeightType::Q4_K);
            self.tensor(&format!("blk.{i}.ffn_up.weight"), &[D_FF, D_MODEL], WeightType::Q4_K);
            self.tensor(&format!("blk.{i}.ffn_down.weight"), &[D_MODEL, D_FF], WeightType::Q4_K);
        }
        self
    }

    fn experts(mut self, arch: &str, n_layer: u32) -> Self {
        self.set(&format!("{arch}.feed_forward_length"), D_FF as u32);
        self.set(&format!("{arch}.expert_count"), 8u32);
        self.set(&format!("{arch}.expert_used_count"), 2u32);
        self.set(&format!("{arch}.expert_feed_forward_length"), 256u32);
        for i in 0..n_layer {
            self.tensor(&format!("blk.{i}.ffn_gate_inp.weight"), &[8, D_MODEL], WeightType::F32);
            self.tensor(&format!("blk.{i}.ffn_gate_exps.weight"), &[8, 256, D_MODEL], WeightType::Q4_K);
            self.tensor(&format!("blk.{i}.ffn_up_exps.weight"), &[8, 256, D_MODEL], WeightType::Q4_K);
            self.tensor(&format!("blk.{i}.ffn_down_exps.weight"), &[8, D_MODEL, 256], WeightType::Q4_K);
        }
        self
    }

    /// Untied, with experts.
    pub fn qwen3moe(n_layer: u32) -> Self {
        let mut h = Self::base("qwen3moe", n_layer).qk_norm(n_layer).experts("qwen3moe", n_layer);
        h.tensor("output.weight", &[N_VOCAB, D_MODEL], WeightType::Q6_K);
        h
    }

    /// Tied.
    pub fn qwen3(n_layer: u32) -> Self {
        Self::base("qwen3", n_layer).qk_norm(n_layer).dense("qwen3", n_layer)
    }

    /// Tied, with biases on q.
    pub fn llama(n_layer: u32) -> Self {
        let mut h = Self::base("llama", n_layer).dense("llama", n_layer);
        for i in 0..n_layer {
            h.tensor(&format!("blk.{i}.attn_q.bias"), &[N_HEAD * D_HEAD], WeightType::F32);
        }
        h
    }

    /// Mixtral's shape under the name `llama`.
    pub fn mixtral(n_layer: u32) -> Self {
        Self::base("llama", n_layer).experts("llama", n_layer)
    }

    /// The same under the name of another architecture.
    pub fn rename(mut self, arch: &str) -> Self {
        let old = format!("{}.", self.arch());
        for (key, value) in &mut self.keys {
            match key.strip_prefix(&old) {
                Some(rest) => *key = format!("{arch}.{rest}"),
                None if key == "general.architecture" => *value = arch.into(),
                None => {}
            }
        }
        self
    }

    /// The architecture it names.
    pub fn arch(&self) -> &str {
        self.keys.iter().find_map(|(_, value)| if let Value::Str(text) = value { text.as_str() } else { None }).unwrap()
    }

    /// Names of its keys.
    pub fn keys(&self) -> impl Iterator<Item = String> {
        self.keys.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>().into_iter()
    }

    /// Sets a key, or replaces it.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.keys.retain(|(k, _)| k != key);
        self.keys.push((key.into(), value.into()));
        self
    }

    /// Takes a key away.
    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(k, _)| k != key);
        self
    }

    /// Adds a tensor, or replaces it.
    pub fn tensor(&mut self, name: &str, shape: &[usize], dtype: WeightType) -> &mut Self {
        self.drop_tensor(name);
        self.tensors.push((name.into(), shape.into(), dtype));
        self
    }

    /// Takes a tensor away.
    pub fn drop_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|(n, ..)| n != name);
        self
    }

    /// Opens a file of the header and as much hole behind it as the weights would take, whatever their size. `None`
    /// where the system has no such files.
    pub fn open_hollow(&self, name: &str) -> Option<Checkpoint> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.keys.len() as u64).to_le_bytes());
        let text = |file: &mut Vec<u8>, text: &str| {
            file.extend((text.len() as u64).to_le_bytes());
            file.extend(text.as_bytes());
        };
        for (key, value) in &self.keys {
            text(&mut file, key);
            file.extend((value.kind() as u32).to_le_bytes());
            match value {
                Value::U32(n) => file.extend(n.to_le_bytes()),
                Value::F32(x) => file.extend(x.to_le_bytes()),
                Value::Bool(b) => file.push(u8::from(*b)),
                Value::Str(s) => text(&mut file, s.as_str().unwrap()),
                Value::Numbers(array) => {
                    file.extend((array.element() as u32).to_le_bytes());
                    file.extend((array.len() as u64).to_le_bytes());
                    for element in array.iter() {
                        match element {
                            Value::U32(n) => file.extend(n.to_le_bytes()),
                            Value::Bool(b) => file.push(u8::from(b)),
                            other => panic!("{key}: {other:?}"),
                        }
                    }
                }
                other => panic!("{key}: {other:?}"),
            }
        }
        let mut offset = 0;
        for (name, shape, dtype) in &self.tensors {
            text(&mut file, name);
            file.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|&axis| file.extend((axis as u64).to_le_bytes()));
            file.extend(dtype.ggml_id().unwrap().to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            let rows: usize = shape[..shape.len() - 1].iter().product();
            offset += (rows * dtype.row_bytes(*shape.last().unwrap()).unwrap()).next_multiple_of(32);
        }
        let path = std::env::temp_dir().join(format!("moebius-{}-{name}.gguf", std::process::id()));
        std::fs::write(&path, &file).unwrap();
        let length = file.len().next_multiple_of(32) + offset;
        let hollow = std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(length as u64));
        let checkpoint = hollow.is_ok().then(|| checkpoint::open(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        checkpoint
    }

    /// Writes the file and opens it.
    pub fn open(&self) -> Checkpoint {
        let mut writer = Writer::new();
        for (key, value) in &self.keys {
            writer.meta(key, value.clone());
        }
        for (name, shape, dtype) in &self.tensors {
            let row = dtype.row_bytes(*shape.last().unwrap()).unwrap();
            let bytes = row * shape[..shape.len() - 1].iter().product::<usize>();
            writer.tensor(name, shape, *dtype, vec![0u8; bytes]);
        }
        let mut file = Vec::new();
        writer.write(&mut file).unwrap();
        checkpoint::from_bytes("tiny.gguf", file).unwrap()
    }
}

fn h_norms(h: &mut Header, layer: u32) {
    h.tensor(&format!("blk.{layer}.attn_q_norm.weight"), &[D_HEAD], WeightType::F32);
    h.tensor(&format!("blk.{layer}.attn_k_norm.weight"), &[D_HEAD], WeightType::F32);
}
