//! The shape of `tokenizer.json`, read in one pass without a copy of the vocabulary. Knows nothing of what the parts
//! mean.
//!
//! Hugging Face documents the format by its library (<https://github.com/huggingface/tokenizers>). Parts that describe
//! a step each (normalizer, pre-tokenizer, ..) become small JSON values, whose size is bounded; the vocabulary and the
//! merges become lists of texts that point into the file.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Most JSON values that a step and those inside it may have.
const MAX_STEP: usize = 4096;

/// What is read of the file.
#[derive(serde::Deserialize)]
pub struct File<'a> {
    #[serde(borrow, default)]
    pub added_tokens: Option<Vec<Added<'a>>>,
    #[serde(default)]
    pub normalizer: Small,
    #[serde(default)]
    pub pre_tokenizer: Small,
    #[serde(default)]
    pub post_processor: Small,
    #[serde(default)]
    pub decoder: Small,
    #[serde(borrow)]
    pub model: Model<'a>,
}

/// A token that is looked for in texts before they are cut.
#[derive(serde::Deserialize)]
pub struct Added<'a> {
    pub id: u32,
    #[serde(borrow)]
    pub content: Text<'a>,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    pub normalized: Option<bool>,
    #[serde(default)]
    pub special: bool,
}

/// The model; the fields are those of BPE, WordPiece and Unigram.
#[derive(serde::Deserialize)]
pub struct Model<'a> {
    #[serde(rename = "type", borrow)]
    pub kind: Option<Text<'a>>,
    #[serde(borrow)]
    pub vocab: Vocab<'a>,
    #[serde(borrow)]
    pub merges: Option<Vec<Merge<'a>>>,
    #[serde(borrow)]
    pub unk_token: Option<Text<'a>>,
    #[serde(borrow)]
    pub continuing_subword_prefix: Option<Text<'a>>,
    #[serde(borrow)]
    pub end_of_word_suffix: Option<Text<'a>>,
    pub unk_id: Option<u32>,
    pub max_input_chars_per_word: Option<usize>,
    #[serde(default)]
    pub byte_fallback: Option<bool>,
    #[serde(default)]
    pub fuse_unk: Option<bool>,
    #[serde(default)]
    pub ignore_merges: Option<bool>,
}

/// A text, out of the file itself where it has no escapes.
#[derive(Clone, Debug)]
pub struct Text<'a>(pub Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Take;
        impl<'de> Visitor<'de> for Take {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.into())))
            }
        }
        json.deserialize_str(Take)
    }
}

/// Tokens and their ids in the order of the file, with their scores where it is a list of such.
pub struct Vocab<'a> {
    pub tokens: Vec<(Text<'a>, u32)>,
    pub scores: Option<Vec<f64>>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Vocab<'a> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Walk;
        impl<'de> Visitor<'de> for Walk {
            type Value = Vocab<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab<'de>, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = map.next_entry()? {
                    tokens.push(token);
                }
                Ok(Vocab { tokens, scores: None })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocab<'de>, A::Error> {
                let (mut tokens, mut scores) = (Vec::new(), Vec::new());
                while let Some((text, score)) = seq.next_element::<(Text<'de>, f64)>()? {
                    let id = u32::try_from(tokens.len()).map_err(|_| A::Error::custom("too many tokens"))?;
                    tokens.push((text, id));
                    scores.push(score);
                }
                Ok(Vocab { tokens, scores: Some(scores) })
            }
        }
        json.deserialize_any(Walk)
    }
}

/// The two sides of a merge: `"a b"` in older files, `["a", "b"]` in newer ones.
pub struct Merge<'a>(pub Text<'a>, pub Text<'a>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Sides;
        impl<'de> Visitor<'de> for Sides {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a merge")
            }

            fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Merge<'de>, E> {
                let (left, right) = sides(text)?;
                Ok(Merge(Text(Cow::Borrowed(left)), Text(Cow::Borrowed(right))))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge<'de>, E> {
                let (left, right) = sides(text)?;
                Ok(Merge(Text(Cow::Owned(left.into())), Text(Cow::Owned(right.into()))))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge<'de>, A::Error> {
                let two = || A::Error::custom("a merge has two sides");
                let merge = Merge(seq.next_element()?.ok_or_else(two)?, seq.next_element()?.ok_or_else(two)?);
                match seq.next_element::<IgnoredAny>()? {
                    None => Ok(merge),
                    Some(_) => Err(two()),
                }
            }
        }
        json.deserialize_any(Sides)
    }
}

fn sides<E: serde::de::Error>(text: &str) -> Result<(&str, &str), E> {
    let sides = text.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty());
    sides.filter(|(_, right)| !right.contains(' ')).ok_or_else(|| E::custom("a merge has two sides"))
}

/// A JSON value of at most [`MAX_STEP`] values.
#[derive(Default)]
pub struct Small(pub Value);

impl<'de> Deserialize<'de> for Small {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        Node(&Cell::new(MAX_STEP)).deserialize(json).map(Small)
    }
}

/// A value, and how many more there may be.
#[derive(Clone, Copy)]
struct Node<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        let left = self.0.get().checked_sub(1);
        self.0.set(left.ok_or_else(|| D::Error::custom(format!("a step has more than {MAX_STEP} values")))?);
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a step")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        while let Some(value) = seq.next_element_seed(self)? {
            out.push(value);
        }
        Ok(Value::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            out.insert(key, map.next_value_seed(self)?);
        }
        Ok(Value::Object(out))
    }
}
