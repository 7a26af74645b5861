//! Bodies of requests: read as they arrive and parsed into the fields that their route knows. What a route does not
//! know is skipped without being built, lists of token ids become numbers, and what is built is counted, so that eight
//! megabytes of JSON are never more than a budget holds. Knows no routes and no engine.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use axum::body::Body as Incoming;
use futures_util::StreamExt;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokio::time::Instant;

use super::error::ApiError;
use super::fields::{Field, Kind, Object, show, whole};
use super::limits::{BODY_RATE, BODY_TIME, MAX_BODY_BYTES, MAX_IDS, MAX_VALUES};
use super::room::Room;

/// Bytes that a value takes at most besides its text, where objects of one field are the costliest.
const VALUE_BYTES: usize = 160;
const OBJECT_BYTES: usize = 480;

/// How many unknown fields are named, and the longest name.
const MAX_UNKNOWN: usize = 16;
/// Texts and runs of tokens in one prompt.
const MAX_PARTS: usize = 256;
const MAX_NAME_BYTES: usize = 40;

/// A parsed body.
#[derive(Debug)]
pub struct Body {
    /// The fields that the route knows.
    pub fields: Object,
    /// The field of kind [`Kind::Prompts`], [`Kind::Shown`] or [`Kind::Ids`], under its name.
    pub prompts: Option<(&'static str, Vec<Prompt>)>,
    /// Names of the first fields that the route does not know.
    pub unknown: Vec<String>,
    /// What it takes.
    pub room: Room,
}

/// A text, tokens in its place, or several of either that are one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Mixed(Vec<Prompt>),
    /// An object with a text and images.
    Shown(Value),
}

impl Prompt {
    /// Bytes of its texts and images.
    pub fn n_bytes(&self) -> usize {
        match self {
            Prompt::Text(text) => text.len(),
            Prompt::Ids(_) => 0,
            Prompt::Mixed(parts) => parts.iter().map(Prompt::n_bytes).sum(),
            Prompt::Shown(object) => cost(object),
        }
    }
}

impl Body {
    /// Of a request that has none.
    pub fn empty(room: Room) -> Body {
        Body { fields: Object::new(), prompts: None, unknown: Vec::new(), room }
    }

    /// Returns whether a field is there and not null.
    pub fn has(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(|value| !value.is_null())
            || self.prompts.as_ref().is_some_and(|(known, _)| *known == name)
    }

    /// Returns the prompts, taken out.
    pub fn take_prompts(&mut self) -> Vec<Prompt> {
        self.prompts.take().map(|(_, prompts)| prompts).unwrap_or_default()
    }
}

/// Returns the error of a body that is longer than any may be.
pub fn too_large() -> ApiError {
    ApiError::new(axum::http::StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {MAX_BODY_BYTES} bytes"))
}

/// Reads a body of `length` bytes, if that was announced. Room is held for what has arrived.
///
/// # Errors
/// 413 and 429 by its size, 408 when it arrives too slowly.
pub async fn read(body: Incoming, length: Option<usize>, room: &mut Room) -> Result<Vec<u8>, ApiError> {
    let mut pieces = body.into_data_stream();
    let mut bytes = Vec::new();
    let start = Instant::now();
    loop {
        let due = start + BODY_TIME + Duration::from_secs_f64(bytes.len() as f64 / BODY_RATE as f64);
        let piece = match tokio::time::timeout_at(due, pieces.next()).await {
            Err(_) => {
                let status = axum::http::StatusCode::REQUEST_TIMEOUT;
                return Err(ApiError::new(status, "the body took too long to arrive"));
            }
            Ok(None) => return Ok(bytes),
            Ok(Some(Err(_))) => return Err(ApiError::bad("the body did not arrive completely")),
            Ok(Some(Ok(piece))) => piece,
        };
        let len = bytes.len() + piece.len();
        if len > MAX_BODY_BYTES {
            return Err(too_large());
        }
        if len > bytes.capacity() {
            // Twice what has come, and no more than is announced.
            let capacity = (2 * len).min(length.unwrap_or(MAX_BODY_BYTES)).max(len);
            room.hold(capacity)?;
            bytes.reserve_exact(capacity - bytes.len());
        }
        bytes.extend_from_slice(&piece);
    }
}

/// Parses a body into what the tables know; `room` holds its bytes already.
///
/// # Errors
/// 400 when it is no JSON object, has too many values, or its prompts are none; 429 when there is no room for what is
/// built.
pub fn parse(bytes: &[u8], tables: &[&'static [Field]], room: Room) -> Result<Body, ApiError> {
    // An editor's mark at the start is no JSON.
    let bytes = whole_characters(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes));
    let mut body = Body::empty(room);
    let raw = if matches!(bytes, Cow::Owned(_)) { 2 * bytes.len() } else { bytes.len() };
    body.room.hold(raw)?;
    let bytes = &*bytes;
    let mut build = Build { tables, body, raw, n_values: 0, built: 0, held: 0, refused: None };
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let parsed = Top(&mut build).deserialize(&mut json).and_then(|()| json.end());
    if let Err(error) = parsed {
        return Err(match build.refused {
            Some(refused) => refused,
            None if error.is_data() => ApiError::bad("the body must be a JSON object"),
            None => ApiError::bad(format!("the body is not JSON: {error}")),
        });
    }
    let Build { mut body, built, .. } = build;
    // The bytes it came as are gone.
    body.room.hold(built)?;
    Ok(body)
}

/// Returns a JSON text in whose strings U+FFFD stands for each half of a surrogate pair. Agents cut strings anywhere, and
/// a history that holds such a half would be refused for ever.
pub fn whole_characters(json: &[u8]) -> Cow<'_, [u8]> {
    let unit = |at: usize| {
        let digits = json.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u32::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut out = Cow::Borrowed(json);
    let mut at = 0;
    while let Some(next) = json.get(at..).and_then(|rest| rest.iter().position(|&byte| byte == b'\\')) {
        at += next;
        match (unit(at), unit(at + 6)) {
            (Some(0xd800..0xdc00), Some(0xdc00..0xe000)) => at += 12,
            (Some(0xd800..0xe000), _) => {
                out.to_mut()[at + 2..at + 6].copy_from_slice(b"fffd");
                at += 6;
            }
            _ => at += 2,
        }
    }
    out
}

/// Returns what a value takes at most, as a parsed body counts it.
pub fn cost(value: &Value) -> usize {
    VALUE_BYTES
        + match value {
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(cost).sum(),
            Value::Object(fields) => {
                OBJECT_BYTES + fields.iter().map(|(name, value)| name.len() + cost(value)).sum::<usize>()
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}

/// A body as far as it is parsed.
struct Build<'t> {
    tables: &'t [&'static [Field]],
    body: Body,
    /// Bytes that it came as.
    raw: usize,
    n_values: usize,
    /// Bytes that were built.
    built: usize,
    /// Of those, what room is held for.
    held: usize,
    refused: Option<ApiError>,
}

impl Build<'_> {
    /// Ends the parse with an answer.
    fn refuse<E: serde::de::Error>(&mut self, why: ApiError) -> E {
        self.refused = Some(why);
        E::custom("refused")
    }

    fn wrong<E: serde::de::Error>(&mut self, name: &str, kind: &Kind, what: impl fmt::Display) -> E {
        self.refuse(ApiError::field(name, format!("must be {kind}")).quoting(format!(", it is {what}")))
    }

    /// Counts what is built.
    fn charge<E: serde::de::Error>(&mut self, bytes: usize) -> Result<(), E> {
        self.built += bytes;
        if self.built > self.held {
            self.held = self.built + (64 << 10);
            self.body.room.hold(self.raw + self.held).map_err(|full| self.refuse(full))?;
        }
        Ok(())
    }

    fn charge_value<E: serde::de::Error>(&mut self, bytes: usize) -> Result<(), E> {
        self.n_values += 1;
        if self.n_values > MAX_VALUES {
            return Err(self.refuse(ApiError::bad(format!("the body has more than {MAX_VALUES} values"))));
        }
        self.charge(bytes)
    }
}

/// The body as a whole.
struct Top<'b, 't>(&'b mut Build<'t>);

impl<'de> DeserializeSeed<'de> for Top<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Top<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Cow<'_, str>>()? {
            let field = self.0.tables.iter().copied().flatten().find(|field| field.name == name);
            match field {
                None => {
                    let unknown = &mut self.0.body.unknown;
                    if unknown.len() < MAX_UNKNOWN && name.len() <= MAX_NAME_BYTES {
                        unknown.push(name.into_owned());
                    }
                    map.next_value::<IgnoredAny>()?;
                }
                Some(Field { name, kind, .. }) if kind.is_prompts() => {
                    let prompts = map.next_value_seed(Prompts { build: &mut *self.0, name, kind })?;
                    self.0.body.prompts = prompts.map(|prompts| (*name, prompts));
                }
                Some(field) => {
                    let value = map.next_value_seed(Tree(&mut *self.0))?;
                    self.0.body.fields.insert(field.name.into(), value);
                }
            }
        }
        Ok(())
    }
}

/// A value of any form.
struct Tree<'b, 't>(&'b mut Build<'t>);

impl Tree<'_, '_> {
    fn leaf<E: serde::de::Error>(self, value: Value) -> Result<Value, E> {
        let text = value.as_str().map_or(0, str::len);
        self.0.charge_value(VALUE_BYTES + text).map(|()| value)
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Value, E> {
        self.leaf(Value::Null)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_string<E: serde::de::Error>(self, value: String) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        self.0.charge_value(VALUE_BYTES)?;
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Tree(&mut *self.0))? {
            items.push(item);
        }
        Ok(items.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        self.0.charge_value(OBJECT_BYTES)?;
        let mut object = Object::new();
        while let Some(name) = map.next_key::<String>()? {
            self.0.charge(VALUE_BYTES + name.len())?;
            let value = map.next_value_seed(Tree(&mut *self.0))?;
            object.insert(name, value);
        }
        Ok(object.into())
    }
}

/// A text, tokens, or a list of either; or tokens alone. `None` for null.
struct Prompts<'b, 't> {
    build: &'b mut Build<'t>,
    name: &'static str,
    kind: &'static Kind,
}

impl Prompts<'_, '_> {
    fn wrong<T, E: serde::de::Error>(self, what: impl fmt::Display) -> Result<T, E> {
        Err(self.build.wrong(self.name, self.kind, what))
    }
}

impl<'de> DeserializeSeed<'de> for Prompts<'_, '_> {
    type Value = Option<Vec<Prompt>>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Prompts<'_, '_> {
    type Value = Option<Vec<Prompt>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("prompts")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Self::Value, E> {
        self.wrong(value)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Self::Value, E> {
        self.wrong(value)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Self::Value, E> {
        self.wrong(value)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Self::Value, E> {
        self.wrong(value)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        match self.kind {
            Kind::Shown(_) => Ok(Some(vec![Prompt::Shown(Tree(self.build).visit_map(map)?)])),
            _ => self.wrong("an object"),
        }
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        if matches!(self.kind, Kind::Ids) {
            return self.wrong("a string");
        }
        self.build.charge(VALUE_BYTES + text.len())?;
        Ok(Some(vec![Prompt::Text(text.into())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let Prompts { build, name, kind } = self;
        let most = if let Kind::Prompts(most) | Kind::Shown(most) = *kind { most } else { 0 };
        // Tokens among texts make one prompt of all.
        let (mut ids, mut prompts, mut is_mixed) = (Vec::new(), Vec::new(), false);
        loop {
            let at = ids.len() + prompts.len();
            let entry = Entry { build: &mut *build, name, kind, at, nested: most > 0, ids: &mut ids };
            let Some(prompt) = seq.next_element_seed(entry)? else { break };
            if let Some(prompt) = prompt {
                is_mixed |= !ids.is_empty();
                prompts.extend((!ids.is_empty()).then(|| Prompt::Ids(std::mem::take(&mut ids))));
                prompts.push(prompt);
            }
            is_mixed |= !prompts.is_empty() && !ids.is_empty();
            let most = if is_mixed { MAX_PARTS } else { most };
            if prompts.len() > most {
                let rest = std::iter::from_fn(|| seq.next_element::<IgnoredAny>().ok().flatten()).count();
                let why = format!("has {} entries, at most {most} are allowed", prompts.len() + rest);
                return Err(build.refuse(ApiError::field(name, why)));
            }
        }
        prompts.extend((!ids.is_empty() || prompts.is_empty()).then_some(Prompt::Ids(ids)));
        Ok(Some(if is_mixed { vec![Prompt::Mixed(prompts)] } else { prompts }))
    }
}

/// An entry of a list: a prompt, or `None` for a token, which is behind the others then.
struct Entry<'b, 't, 'i> {
    build: &'b mut Build<'t>,
    name: &'static str,
    kind: &'static Kind,
    at: usize,
    /// Whether it may be a text or a list itself.
    nested: bool,
    ids: &'i mut Vec<u32>,
}

impl Entry<'_, '_, '_> {
    fn id<E: serde::de::Error>(self, value: Value) -> Result<Option<Prompt>, E> {
        let Some(id) = whole(&value).and_then(|id| u32::try_from(id).ok()) else {
            let why = format!("must be {}", Kind::Int(0, u32::MAX as i128));
            let wrong = ApiError::field(format!("{}[{}]", self.name, self.at), why);
            return Err(self.build.refuse(wrong.quoting(format!(", it is {}", show(&value)))));
        };
        if self.ids.len() == MAX_IDS {
            return Err(self.build.refuse(ApiError::field(self.name, format!("has more than {MAX_IDS} entries"))));
        }
        // Vectors grow to twice what they hold.
        self.build.charge(2 * size_of::<u32>())?;
        self.ids.push(id);
        Ok(None)
    }

    fn wrong<T, E: serde::de::Error>(self, what: &str) -> Result<T, E> {
        Err(self.build.wrong(self.name, self.kind, format!("a list with {what} in it")))
    }
}

impl<'de> DeserializeSeed<'de> for Entry<'_, '_, '_> {
    type Value = Option<Prompt>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Option<Prompt>, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Entry<'_, '_, '_> {
    type Value = Option<Prompt>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt or a token")
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Option<Prompt>, E> {
        self.id(value.into())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Option<Prompt>, E> {
        self.id(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Option<Prompt>, E> {
        self.id(value.into())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Option<Prompt>, E> {
        if !self.nested {
            return self.wrong("a string");
        }
        self.build.charge(VALUE_BYTES + text.len())?;
        Ok(Some(Prompt::Text(text.into())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Option<Prompt>, A::Error> {
        if !self.nested {
            return self.wrong("a list");
        }
        let Entry { build, name, kind, .. } = self;
        build.charge(VALUE_BYTES)?;
        let mut ids = Vec::new();
        loop {
            let entry = Entry { build: &mut *build, name, kind, at: ids.len(), nested: false, ids: &mut ids };
            if seq.next_element_seed(entry)?.is_none() {
                return Ok(Some(Prompt::Ids(ids)));
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Option<Prompt>, A::Error> {
        match self.kind {
            Kind::Shown(_) if self.nested => Ok(Some(Prompt::Shown(Tree(self.build).visit_map(map)?))),
            _ => self.wrong("an object"),
        }
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<Option<Prompt>, E> {
        self.wrong("a truth value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Option<Prompt>, E> {
        self.wrong("null")
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields::field;
    use super::super::limits::FREE_BYTES;
    use super::super::room::Budget;
    use super::*;
    use serde_json::json;

    const TABLE: &[Field] = &[
        field("messages", Kind::List(&Kind::Object, 4), ""),
        field("n", Kind::Int(0, 9), ""),
        field("prompt", Kind::Prompts(3), ""),
        field("tokens", Kind::Ids, ""),
        field("shown", Kind::Shown(2), ""),
    ];

    fn parsed(text: &str, budget: &Budget) -> Result<Body, ApiError> {
        let mut room = budget.room();
        room.hold(text.len())?;
        parse(text.as_bytes(), &[TABLE], room)
    }

    #[test]
    fn halves_of_characters_are_replaced() {
        for (json, expected) in [
            (r#""a\ud83d b""#, "a\u{fffd} b"),
            (r#""\udc00\ud83d""#, "\u{fffd}\u{fffd}"),
            (r#""\ud83e\udd8a \ud83d\ud83e\udd8a""#, "🦊 \u{fffd}🦊"),
            (r#""\\ud83d \u00e9 \n""#, "\\ud83d é \n"),
            (r#""\ud83""#, ""),
        ] {
            let text: Option<String> = serde_json::from_slice(&whole_characters(json.as_bytes())).ok();
            assert_eq!(text.unwrap_or_default(), expected, "{json}");
        }
        assert!(matches!(whole_characters(br#"{"a": "b\\"}"#), Cow::Borrowed(_)));
        assert!(matches!(whole_characters(br"\"), Cow::Borrowed(_)));
    }

    #[test]
    fn prompts_have_four_forms() {
        let text = |text: &str| Prompt::Text(text.into());
        let ids = |ids: &[u32]| Prompt::Ids(ids.to_vec());
        let cases = [
            (json!({"prompt": "a"}), Ok(vec![text("a")])),
            (json!({"prompt": [1, 2.0, 4294967295u32]}), Ok(vec![ids(&[1, 2, u32::MAX])])),
            (json!({"prompt": []}), Ok(vec![ids(&[])])),
            (json!({"prompt": ["a", "b"]}), Ok(vec![text("a"), text("b")])),
            (json!({"prompt": [[1], []]}), Ok(vec![ids(&[1]), ids(&[])])),
            (json!({"prompt": null}), Ok(vec![])),
            (json!({"tokens": [7]}), Ok(vec![ids(&[7])])),
            (json!({"prompt": {"a": 1}}), Err("`prompt` must be")),
            (json!({"prompt": true}), Err("`prompt` must be")),
            (json!({"prompt": ["a", [1]]}), Ok(vec![text("a"), ids(&[1])])),
            (json!({"prompt": ["a", 1]}), Ok(vec![Prompt::Mixed(vec![text("a"), ids(&[1])])])),
            (
                json!({"prompt": [1, 2, "a", "b", 3]}),
                Ok(vec![Prompt::Mixed(vec![ids(&[1, 2]), text("a"), text("b"), ids(&[3])])]),
            ),
            (
                json!({"prompt": ([vec![json!("a"); MAX_PARTS], vec![json!(1)]].concat())}),
                Err("`prompt` has 257 entries, at most 3"),
            ),
            (
                json!({"prompt": ([vec![json!(1)], vec![json!("a"); MAX_PARTS]].concat())}),
                Err("`prompt` has 257 entries"),
            ),
            (json!({"shown": {"a": [1]}}), Ok(vec![Prompt::Shown(json!({"a": [1]}))])),
            (json!({"shown": ["a", {}]}), Ok(vec![text("a"), Prompt::Shown(json!({}))])),
            (json!({"shown": [{}, {}, {}]}), Err("`shown` has 3 entries, at most 2")),
            (json!({"shown": [[{}]]}), Err("`shown` must be")),
            (json!({"tokens": [1, "a"]}), Err("`tokens` must be")),
            (json!({"prompt": [[[1]]]}), Err("`prompt` must be")),
            (json!({"prompt": [[1, {}]]}), Err("`prompt` must be")),
            (json!({"prompt": [null]}), Err("`prompt` must be")),
            (json!({"prompt": [1, -1]}), Err("`prompt[1]` must be a whole number")),
            (json!({"prompt": [[1, 2, 0.5]]}), Err("`prompt[2]` must be a whole number")),
            (json!({"prompt": vec!["x"; 9]}), Err("`prompt` has 9 entries, at most 3")),
            (json!({"tokens": "a"}), Err("`tokens` must be")),
            (json!({"tokens": [[1]]}), Err("`tokens` must be")),
            (json!({"tokens": vec![1; MAX_IDS + 1]}), Err("`tokens` has more than")),
        ];
        let budget = Budget::new(64 << 20);
        for (body, expected) in cases {
            let shown: String = body.to_string().chars().take(60).collect();
            match (parsed(&body.to_string(), &budget), expected) {
                (Ok(mut body), Ok(expected)) => {
                    assert_eq!(body.take_prompts(), expected, "{shown}");
                }
                (Err(error), Err(start)) => assert!(error.message.starts_with(start), "{shown}: {}", error.message),
                (got, _) => panic!("{shown}: {got:?}"),
            }
        }
    }

    #[test]
    fn a_body_is_one_object_of_json() {
        let budget = Budget::new(1 << 20);
        for (text, why) in [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("{} x", "not JSON"),
            ("{\"x\": [1, }", "not JSON"),
            ("{\"x\": 1e}", "not JSON"),
            ("{\"n\": 1e999}", "not JSON"),
            ("[]", "a JSON object"),
            ("\"x\"", "a JSON object"),
            ("null", "a JSON object"),
        ] {
            let error = parsed(text, &budget).unwrap_err();
            assert!(error.message.contains(why), "{text}: {}", error.message);
        }
        // As everywhere, the last of several fields of one name counts.
        let body = parsed("{\"n\": 1, \"n\": 2, \"m\": [[{}]]}", &budget).unwrap();
        assert_eq!(Value::from(body.fields), json!({"n": 2}));
    }

    #[test]
    fn what_is_not_known_costs_nothing_and_what_is_known_is_counted() {
        let budget = Budget::new(64 << 20);
        let bomb = |name: &str, n| format!("{{\"{name}\": [{}{{}}]}}", "{\"\":0},".repeat(n));
        let mut skipped = parsed(&bomb("x", 800_000), &budget).unwrap();
        assert!(skipped.fields.is_empty());
        assert_eq!(budget.free(), 64 << 20);
        skipped.room.hold(0).unwrap();
        let error = parsed(&bomb("messages", 800_000), &budget).unwrap_err();
        assert_eq!((error.status.as_u16(), error.message.contains("100000 values")), (400, true));
        // Three of them, where there is room for two.
        let budget = Budget::new(40 << 20);
        let first = parsed(&bomb("messages", 20_000), &budget).unwrap();
        assert!(budget.free() < (40 << 20) - (20_000 * 480) + FREE_BYTES, "{}", budget.free());
        let second = parsed(&bomb("messages", 20_000), &budget).unwrap();
        assert_eq!(parsed(&bomb("messages", 20_000), &budget).unwrap_err().status, 429);
        drop((first, second));
        assert_eq!(budget.free(), 40 << 20);
    }
}
