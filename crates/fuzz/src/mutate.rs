//! Inputs out of other inputs. An input is one part or several, with a line `%%` between them; a part that is JSON is
//! changed as a value, a GGUF file as keys and tensors, anything else as words or bytes.

use std::borrow::Cow;

use checkpoint::gguf::Writer;
use checkpoint::{Checkpoint, Value as GgufValue};
use quant::WeightType;
use serde_json::{Map, Number, Value};

/// Between the parts of an input.
pub const BETWEEN: &[u8] = b"\n%%\n";

/// Random numbers from a seed (splitmix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 for 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// True one time in `n`.
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }

    /// A length or a count: mostly small.
    fn length(&mut self, most: usize) -> usize {
        let bits = self.below(usize::BITS as usize - most.leading_zeros() as usize + 1);
        self.below((1usize << bits.min(62)).min(most.saturating_add(1)))
    }

    /// A number that is often interesting as a length, a count or a kind.
    fn word(&mut self) -> u64 {
        let shift = self.below(64);
        match self.below(5) {
            0 => self.below(40) as u64,
            1 => self.next(),
            2 => 1 << shift,
            3 => u64::MAX >> shift,
            _ => (1u64 << shift).wrapping_sub(2).wrapping_add(self.below(4) as u64),
        }
    }
}

/// A hash for file names (FNV-1a).
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &byte| (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// What the corpus is made of: words of its texts, keys and values of its JSON.
#[derive(Default)]
pub struct Dictionary {
    words: Vec<Vec<u8>>,
    keys: Vec<String>,
    values: Vec<Value>,
}

impl Dictionary {
    pub fn of(corpus: &[Vec<u8>]) -> Dictionary {
        let mut dictionary = Dictionary::default();
        for part in corpus.iter().flat_map(|input| parts(input)) {
            match serde_json::from_slice::<Value>(&part) {
                Ok(value) => dictionary.gather(&value),
                Err(_) => {
                    let kind = |b: u8| if b.is_ascii_alphanumeric() || b == b'_' { 0 } else { 1 + usize::from(b) };
                    let words = part.chunk_by(|&a, &b| kind(a) == kind(b)).filter(|word| word.len() <= 40);
                    dictionary.words.extend(words.take(20_000).map(<[u8]>::to_vec));
                }
            }
        }
        dictionary.words.sort();
        dictionary.words.dedup();
        dictionary.keys.sort();
        dictionary.keys.dedup();
        dictionary
    }

    fn gather(&mut self, value: &Value) {
        if self.values.len() < 20_000 && value.to_string().len() < 400 {
            self.values.push(value.clone());
        }
        match value {
            Value::Array(items) => items.iter().take(200).for_each(|item| self.gather(item)),
            Value::Object(map) => map.iter().take(200).for_each(|(key, value)| {
                self.keys.push(key.clone());
                self.gather(value);
            }),
            Value::String(text) => self.words.push(text.clone().into_bytes()),
            _ => {}
        }
    }
}

/// The parts of an input.
pub fn parts(input: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut rest = input;
    while let Some((&first, tail)) = rest.split_first() {
        match rest.strip_prefix(BETWEEN) {
            Some(after) if !input.starts_with(b"GGUF") => {
                parts.push(Vec::new());
                rest = after;
            }
            _ => {
                parts.last_mut().into_iter().for_each(|part| part.push(first));
                rest = tail;
            }
        }
    }
    parts
}

/// An input from one of the corpus, changed in one to some places.
pub fn mutate(corpus: &[Vec<u8>], dictionary: &Dictionary, random: &mut Random, max_bytes: usize) -> Vec<u8> {
    let mut parts = random.pick(corpus).map(|input| parts(input)).unwrap_or_default();
    let other = random.pick(corpus).map(|input| self::parts(input)).unwrap_or_default();
    let most = if random.one_in(4) { 8 } else { 2 };
    let rounds = 1 + random.length(most);
    for _ in 0..rounds {
        let mut i = random.below(parts.len());
        // A kind or a path is rarely what an input is about.
        if parts.get(i).is_some_and(|part| part.len() < 40) && !random.one_in(8) {
            i = (0..parts.len()).max_by_key(|&i| parts[i].len()).unwrap_or(0);
        }
        let Some(part) = parts.get_mut(i) else { break };
        let donor = other.get(i).map_or(&[][..], Vec::as_slice);
        if random.one_in(40) {
            *part = donor.to_vec();
        } else if let Some(changed) = structured(part, donor, dictionary, random) {
            *part = changed;
        } else if random.one_in(3) {
            change_bytes(part, random);
        } else {
            change_words(part, donor, dictionary, random);
        }
    }
    let mut input = parts.join(BETWEEN);
    input.truncate(max_bytes);
    input
}

/// A part changed by its structure, mostly, where it has one.
fn structured(part: &[u8], donor: &[u8], dictionary: &Dictionary, random: &mut Random) -> Option<Vec<u8>> {
    if random.one_in(8) {
        return None;
    }
    if part.starts_with(b"GGUF") {
        return change_gguf(part, donor, random);
    }
    let mut value: Value = serde_json::from_slice(part).ok().filter(|v: &Value| v.is_object() || v.is_array())?;
    let at = random.below(count(&value));
    change_json(&mut value, &mut { at }, dictionary, random);
    serde_json::to_vec(&value).ok()
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0,
    }
}

/// Changes the `at`-th value of a tree; true once it is done.
fn change_json(value: &mut Value, at: &mut usize, dictionary: &Dictionary, random: &mut Random) -> bool {
    if *at > 0 {
        *at -= 1;
        return match value {
            Value::Array(items) => items.iter_mut().any(|item| change_json(item, at, dictionary, random)),
            Value::Object(map) => map.values_mut().any(|value| change_json(value, at, dictionary, random)),
            _ => false,
        };
    }
    match (random.below(10), &mut *value) {
        (0..=3, Value::Object(map)) => change_object(map, dictionary, random),
        (0..=4, Value::Array(items)) => {
            let i = random.below(items.len());
            match (random.below(4), items.get(i).cloned()) {
                (0, Some(_)) => drop(items.remove(i)),
                (1, Some(item)) => {
                    let n = random.length(300);
                    items.splice(i..i, std::iter::repeat_n(item, n));
                }
                (2, Some(item)) => items.push(item),
                _ => items.push(any_value(dictionary, random)),
            }
        }
        (0..=4, Value::String(text)) => {
            let mut bytes = std::mem::take(text).into_bytes();
            change_words(&mut bytes, &[], dictionary, random);
            *text = String::from_utf8_lossy(&bytes).into_owned();
        }
        (5, _) => {
            for _ in 0..=random.length(200) {
                *value = match random.one_in(2) {
                    true => Value::Array(vec![value.take()]),
                    false => Value::Object(Map::from_iter([(any_key(dictionary, random), value.take())])),
                };
            }
        }
        _ => *value = any_value(dictionary, random),
    }
    true
}

fn change_object(map: &mut Map<String, Value>, dictionary: &Dictionary, random: &mut Random) {
    let i = random.below(map.len());
    let entry = map.iter().nth(i).map(|(key, value)| (key.clone(), value.clone()));
    match (random.below(3), entry) {
        (0, Some((key, _))) => drop(map.shift_remove(&key)),
        (1, Some((key, value))) => {
            map.shift_remove(&key);
            map.insert(any_key(dictionary, random), value);
        }
        _ => drop(map.insert(any_key(dictionary, random), any_value(dictionary, random))),
    }
}

fn any_key(dictionary: &Dictionary, random: &mut Random) -> String {
    match random.pick(&dictionary.keys) {
        Some(key) if !random.one_in(10) => key.clone(),
        _ => text(random),
    }
}

fn any_value(dictionary: &Dictionary, random: &mut Random) -> Value {
    match random.below(10) {
        0 => Value::Null,
        1 => random.one_in(2).into(),
        2 => random.word().into(),
        3 => (random.word() as i64).into(),
        4 => Number::from_f64(f64::from_bits(random.next())).map_or(Value::Null, Value::Number),
        5 => text(random).into(),
        _ => random.pick(&dictionary.values).cloned().unwrap_or_default(),
    }
}

/// Texts that programs stumble over.
fn text(random: &mut Random) -> String {
    const TEXTS: &[&str] = &[
        "",
        "a",
        "\0",
        "\u{202e}",
        "\u{feff}",
        "\u{1b}[31m",
        "日本",
        "e\u{301}",
        "😀",
        "\u{10ffff}",
        "-1",
        "1e400",
        "NaN",
        "../x",
        "%s%n",
        "(a|aa)*",
        "[^Z]*Z|.",
        ".*.*.*",
        "\\p{L}{100}",
        "(?=",
        "a{1000}",
        "<|im_end|>",
        "{{ x }}",
        "{% for i in range(9) %}",
        "\r\n",
        "0x10",
        "$ref",
        "#/$defs/a",
        "true",
    ];
    let word = random.pick(TEXTS).copied().unwrap_or_default();
    let n = if random.one_in(3) { random.length(3_000) } else { 1 };
    word.repeat(n)
}

/// Changes a text by its words: leaves some out, doubles some, puts others in.
fn change_words(part: &mut Vec<u8>, donor: &[u8], dictionary: &Dictionary, random: &mut Random) {
    let at = random.below(part.len() + 1);
    let end = at + random.length(part.len() - at);
    match random.below(6) {
        0 => drop(part.drain(at..end)),
        1 => {
            let range = part[at..end].to_vec();
            let n = random.length(if range.len() > 100 { 8 } else { 400 });
            part.splice(at..at, range.repeat(n));
        }
        2 => {
            let from = random.below(donor.len() + 1);
            let range = donor[from..from + random.length(donor.len() - from)].to_vec();
            drop(part.splice(at..end, range));
        }
        3 => drop(part.splice(at..at, text(random).into_bytes())),
        _ => {
            let word = random.pick(&dictionary.words).cloned().unwrap_or_default();
            let to = if random.one_in(2) { at } else { end.min(at + 12) };
            drop(part.splice(at..to, word));
        }
    }
}

/// Changes bytes: cuts, removes, inserts or overwrites some.
fn change_bytes(part: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(part.len() + 1);
    let word = random.word().to_le_bytes();
    let n = [1, 2, 4, 8][random.below(4)].min(part.len() - at);
    match random.below(8) {
        0 if random.one_in(4) => part.truncate(at),
        1 => drop(part.drain(at..at + n)),
        2 => drop(part.splice(at..at, word)),
        3 if at < part.len() => part[at] ^= 1 << random.below(8),
        _ => part[at..at + n].copy_from_slice(&word[..n]),
    }
}

/// Changes a GGUF file's keys or tensors, and writes it anew; `None` where it cannot be read, or not be written.
fn change_gguf(part: &[u8], donor: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let model = checkpoint::from_bytes("part", part.to_vec()).ok()?;
    let other = checkpoint::from_bytes("donor", donor.to_vec()).ok();
    let keys: Vec<(&str, &GgufValue)> = model.meta().iter().collect();
    let foreign: Vec<(&str, &GgufValue)> = other.iter().flat_map(|other| other.meta().iter()).collect();
    let tensors = stored(&model)?;
    let (what, which, tensor) = (random.below(8), random.below(keys.len()), random.below(tensors.len()));
    let mut file = Writer::new();
    for (i, (key, value)) in keys.iter().enumerate() {
        if *key == "general.alignment" {
            continue;
        }
        match what {
            0 if i == which => {}
            1..=3 if i == which => drop(file.meta(key, any_gguf_value(value, &keys, random))),
            4 if i == which => {
                let (key, value) = random.pick(&foreign).copied().unwrap_or((key, value));
                file.meta(key, value.clone());
            }
            _ => drop(file.meta(key, (*value).clone())),
        };
    }
    for (i, t) in tensors.iter().enumerate() {
        let bytes = &t.bytes[..];
        match what {
            5 if i == tensor => {}
            6 if i == tensor => {
                let mut shape = t.shape.clone();
                let axis = random.below(shape.len());
                shape[axis] = 1 + random.length(2 * shape[axis]);
                let row = t.dtype.plane_bytes(*shape.last()?)?.total();
                let n = row.checked_mul(shape.iter().rev().skip(1).product())?.min(1 << 20);
                let bytes: Vec<u8> = bytes.iter().copied().cycle().take(n).collect();
                file.tensor(&t.name, &shape, t.dtype, bytes);
            }
            7 if i == tensor => {
                let dtype = random.pick(&WeightType::ALL).copied()?;
                let n = dtype.plane_bytes(*t.shape.last()?)?.total() * t.shape.iter().rev().skip(1).product::<usize>();
                file.tensor(&t.name, &t.shape, dtype, bytes.iter().copied().cycle().take(n).collect::<Vec<u8>>());
            }
            _ => drop(file.tensor(&t.name, &t.shape, t.dtype, bytes)),
        };
    }
    let mut out = Vec::new();
    file.write(&mut out).ok()?;
    Some(out)
}

/// A tensor as a GGUF file stores it.
struct Stored<'a> {
    name: String,
    shape: Vec<usize>,
    dtype: WeightType,
    bytes: Cow<'a, [u8]>,
}

/// The tensors of a file. Matrices that were joined with their scales are taken apart again; `None` where one cannot be
/// read.
fn stored(model: &Checkpoint) -> Option<Vec<Stored<'_>>> {
    model.hold_repacked().ok()?;
    let mut all = Vec::new();
    for t in model.tensors() {
        let (planes, is_joined) = (model.planes(t), model.files()[t.file].is_repacked());
        let dtype = if is_joined { WeightType::NVFP4 } else { t.dtype };
        all.push(Stored { name: t.name.clone(), shape: t.shape.clone(), dtype, bytes: planes.q.into() });
        if is_joined {
            let n = if t.shape.len() == 3 { t.shape[0] } else { 1 };
            let of_matrix = planes.scales.chunks((planes.scales.len() / n).max(4));
            let scales = of_matrix.filter_map(|matrix| matrix.first_chunk::<4>()).flatten().copied();
            let name = format!("{}.scale", t.name.strip_suffix(".weight")?);
            all.push(Stored { name, shape: vec![n], dtype: WeightType::F32, bytes: scales.collect() });
        }
    }
    Some(all)
}

fn any_gguf_value(value: &GgufValue, keys: &[(&str, &GgufValue)], random: &mut Random) -> GgufValue {
    let word = random.word();
    match random.below(8) {
        0 => (word as u32).into(),
        1 => word.into(),
        2 => (word as i32).into(),
        3 => f32::from_bits(word as u32).into(),
        4 => random.one_in(2).into(),
        5 => text(random).as_str().into(),
        6 => match value {
            GgufValue::Strings(strings) => {
                let mut strings: Vec<String> =
                    strings.iter().map(|s| String::from_utf8_lossy(s).into_owned()).collect();
                let i = random.below(strings.len());
                match strings.get_mut(i) {
                    Some(place) => *place = text(random),
                    None => strings.push(text(random)),
                }
                strings.truncate(random.length(2 * strings.len()).max(1));
                strings.iter().map(String::as_str).collect::<Vec<_>>().into()
            }
            _ => (random.below(300) as u32).into(),
        },
        _ => random.pick(keys).map_or_else(|| value.clone(), |(_, value)| (*value).clone()),
    }
}
