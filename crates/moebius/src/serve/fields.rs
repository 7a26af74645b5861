//! Request bodies: one table a route says which fields it knows, of which type and range. Checking and `/openapi.json`
//! read the same tables. Unknown fields are ignored; `null` counts as absent.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::limits::MAX_IDS;

/// A JSON object.
pub type Object = Map<String, Value>;

/// A field that a route knows.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub about: &'static str,
}

/// Values that a field may have.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Bool,
    /// A whole number in this range.
    Int(i128, i128),
    /// A number in this range.
    Number(f64, f64),
    /// A text.
    Text,
    /// One of these words.
    Word(&'static [&'static str]),
    /// Maximum number of items.
    List(&'static Kind, usize),
    /// An object, which its route looks into.
    Object,
    /// Token ids. A body has one field of this kind or the next, which is kept apart as numbers.
    Ids,
    /// A text, token ids, or at most so many of either.
    Prompts(usize),
    /// The same, or objects with a text and images, which the route looks into.
    Shown(usize),
    /// Any of these kinds.
    Either(&'static [Kind]),
    /// A field of other servers, refused with this reason unless its value asks for nothing.
    Unsupported(&'static str),
}

/// Returns a field that other servers have and this one lacks, for the reason `why`.
pub const fn unsupported(name: &'static str, why: &'static str) -> Field {
    Field { name, kind: Kind::Unsupported(why), about: why }
}

/// Returns whether a value is what clients send for a field that they do not use.
fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(_) | Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Returns a field of a table.
pub const fn field(name: &'static str, kind: Kind, about: &'static str) -> Field {
    Field { name, kind, about }
}

/// Checks what the tables know of in a body.
pub fn check(body: &Object, tables: &[&[Field]]) -> Result<(), ApiError> {
    for field in tables.iter().copied().flatten() {
        if let Some(value) = body.get(field.name).filter(|value| !value.is_null()) {
            field.kind.check(field.name, value)?;
        }
    }
    Ok(())
}

/// Refuses a name that is a slip of the pen away from a field of the tables: what it was to set would silently keep its
/// default. Other unknown names are passed over: clients send what other servers know.
pub fn check_names(unknown: &[String], tables: &[&[Field]]) -> Result<(), ApiError> {
    for name in unknown {
        let is_meant = |field: &&Field| field.name.len() >= MIN_NAME && is_slip(name, field.name);
        if let Some(field) = tables.iter().copied().flatten().find(is_meant) {
            let why = format!("is unknown; did you mean `{}`?", field.name);
            return Err(ApiError::field(name.as_str(), why));
        }
    }
    Ok(())
}

/// Shorter names are neighbors by chance: `top_a`, another server's sampler, and `top_k`.
const MIN_NAME: usize = 6;

/// Returns whether one letter more, less or other, two neighbors exchanged, or another case and `-` for `_` make one
/// name of the other.
fn is_slip(a: &str, b: &str) -> bool {
    let plain = |name: &str| name.bytes().map(|c| if c == b'-' { b'_' } else { c.to_ascii_lowercase() }).collect();
    let (a, b): (Vec<u8>, Vec<u8>) = (plain(a), plain(b));
    let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let (a, b) = (&a[same..], &b[same..]);
    match (a, b) {
        ([_, x @ ..], [_, y @ ..]) if x == y => true,
        ([x1, x2, x @ ..], [y1, y2, y @ ..]) if (x1, x2) == (y2, y1) && x == y => true,
        ([_, x @ ..], y) if x == y => true,
        (x, [_, y @ ..]) if x == y => true,
        (x, y) => x == y,
    }
}

impl Kind {
    /// Says by name what is wrong with a value.
    pub fn check(&self, name: &str, value: &Value) -> Result<(), ApiError> {
        if let Kind::List(inner, most) = self
            && let Value::Array(items) = value
        {
            if items.len() > *most {
                return Err(ApiError::field(name, format!("has {} entries, at most {most} are allowed", items.len())));
            }
            return items.iter().enumerate().try_for_each(|(i, item)| inner.check(&format!("{name}[{i}]"), item));
        }
        if let Kind::Unsupported(why) = self {
            return if asks_nothing(value) {
                Ok(())
            } else {
                Err(ApiError::field(name, format!("is unsupported: {why}")))
            };
        }
        if let Kind::Either(kinds) = self {
            // The kind of the same JSON type knows best what is wrong.
            return match kinds.iter().find(|kind| kind.is_like(value)) {
                Some(kind) => kind.check(name, value),
                None => Err(self.refusal(name, value)),
            };
        }
        let fits = match self {
            Kind::Bool => value.is_boolean(),
            Kind::Int(low, high) => whole(value).is_some_and(|n| (*low..=*high).contains(&n)),
            Kind::Number(low, high) => value.as_f64().is_some_and(|x| (*low..=*high).contains(&x)),
            Kind::Text => value.is_string(),
            Kind::Word(words) => value.as_str().is_some_and(|word| words.contains(&word)),
            Kind::Object => value.is_object(),
            Kind::List(..) | Kind::Either(_) | Kind::Ids | Kind::Prompts(_) | Kind::Shown(_) | Kind::Unsupported(_) => {
                false
            }
        };
        if fits { Ok(()) } else { Err(self.refusal(name, value)) }
    }

    fn refusal(&self, name: &str, value: &Value) -> ApiError {
        ApiError::field(name, format!("must be {self}")).quoting(format!(", it is {}", show(value)))
    }

    /// Returns whether it is kept apart from other fields.
    pub fn is_prompts(&self) -> bool {
        matches!(self, Kind::Ids | Kind::Prompts(_) | Kind::Shown(_))
    }

    fn is_like(&self, value: &Value) -> bool {
        match self {
            Kind::Bool => value.is_boolean(),
            Kind::Int(..) | Kind::Number(..) => value.is_number(),
            Kind::Text | Kind::Word(_) => value.is_string(),
            Kind::List(inner, _) => value.as_array().is_some_and(|items| items.iter().all(|item| inner.is_like(item))),
            Kind::Object => value.is_object(),
            Kind::Ids | Kind::Prompts(_) | Kind::Shown(_) | Kind::Unsupported(_) => false,
            Kind::Either(kinds) => kinds.iter().any(|kind| kind.is_like(value)),
        }
    }

    /// Returns its JSON schema.
    pub fn schema(&self) -> Value {
        match self {
            Kind::Bool => json!({"type": "boolean"}),
            Kind::Int(low, high) => {
                let number = |n: i128| i64::try_from(n).map_or_else(|_| json!(n as f64), |n| json!(n));
                json!({"type": "integer", "minimum": number(*low), "maximum": number(*high)})
            }
            Kind::Number(low, high) => json!({"type": "number", "minimum": low, "maximum": high}),
            Kind::Text => json!({"type": "string"}),
            Kind::Word(words) => json!({"type": "string", "enum": words}),
            Kind::List(inner, most) => json!({"type": "array", "items": inner.schema(), "maxItems": most}),
            Kind::Object => json!({"type": "object", "additionalProperties": true}),
            Kind::Ids => {
                json!({"type": "array", "items": Kind::Int(0, u32::MAX as i128).schema(), "maxItems": MAX_IDS})
            }
            Kind::Prompts(most) => {
                let list = |items: Value| json!({"type": "array", "items": items, "maxItems": most});
                let (text, ids) = (Kind::Text.schema(), Kind::Ids.schema());
                json!({"oneOf": [text, ids, list(text.clone()), list(ids.clone())]})
            }
            Kind::Shown(most) => {
                let object = Kind::Object.schema();
                let list = json!({"type": "array", "items": object, "maxItems": most});
                json!({"oneOf": [Kind::Prompts(*most).schema(), object, list]})
            }
            Kind::Either(kinds) => json!({"oneOf": kinds.iter().map(Kind::schema).collect::<Vec<_>>()}),
            Kind::Unsupported(_) => json!({"deprecated": true}),
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Bool => write!(f, "true or false"),
            Kind::Int(low, high) => write!(f, "a whole number from {low} to {high}"),
            Kind::Number(low, high) if *high >= f64::from(f32::MAX) && *low <= -f64::from(f32::MAX) => {
                write!(f, "a number")
            }
            Kind::Number(low, high) if *high >= f64::from(f32::MAX) => write!(f, "a number of at least {low}"),
            Kind::Number(low, high) => write!(f, "a number from {low} to {high}"),
            Kind::Text => write!(f, "a string"),
            Kind::Word(words) => write!(f, "one of {}", words.join(", ")),
            Kind::List(inner, _) => write!(f, "a list, each entry {inner}"),
            Kind::Object => write!(f, "an object"),
            Kind::Ids => write!(f, "a list of token ids"),
            Kind::Prompts(_) => {
                write!(f, "a string, a list of token ids and strings, or a list of strings or of such lists")
            }
            Kind::Shown(_) => write!(f, "{}; or objects with `prompt_string` and `multimodal_data`", Kind::Prompts(1)),
            Kind::Either(kinds) => kinds
                .iter()
                .enumerate()
                .try_for_each(|(i, kind)| write!(f, "{}{kind}", if i > 0 { " or " } else { "" })),
            Kind::Unsupported(_) => write!(f, "absent"),
        }
    }
}

/// Returns a number without a fraction, also where it is written with one (`5.0`).
pub fn whole(value: &Value) -> Option<i128> {
    let number = value.as_number()?;
    number.as_i128().or_else(|| number.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 1e15).map(|x| x as i128))
}

/// Returns a value for a message: short, whatever it is.
pub fn show(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".into(),
        Value::String(text) if text.len() > 40 => format!("a string of {} bytes", text.len()),
        other => other.to_string(),
    }
}

/// Reading fields that were checked: a field of another kind reads as absent.
pub trait Read {
    fn value(&self, name: &str) -> Option<&Value>;

    fn flag(&self, name: &str) -> Option<bool> {
        self.value(name)?.as_bool()
    }

    fn int(&self, name: &str) -> Option<i128> {
        whole(self.value(name)?)
    }

    fn size(&self, name: &str) -> Option<usize> {
        self.int(name).map(|n| n.clamp(0, usize::MAX as i128) as usize)
    }

    fn number(&self, name: &str) -> Option<f32> {
        self.value(name)?.as_f64().map(|x| x as f32)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.value(name)?.as_str()
    }

    fn list(&self, name: &str) -> Option<&Vec<Value>> {
        self.value(name)?.as_array()
    }

    fn object(&self, name: &str) -> Option<&Object> {
        self.value(name)?.as_object()
    }
}

impl Read for Object {
    fn value(&self, name: &str) -> Option<&Value> {
        self.get(name).filter(|value| !value.is_null())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_names_are_refused_and_others_are_not() {
        const TABLE: &[Field] = &[field("temperature", Kind::Bool, ""), field("top_k", Kind::Bool, "")];
        for (name, is_slip) in [
            ("temprature", true),
            ("temperture", true),
            ("temperatuer", true),
            ("tempereture", true),
            ("temperatures", true),
            ("Temperature", true),
            ("foo", false),
            ("top_a", false),
            ("temperature_last", false),
            ("", false),
        ] {
            let result = check_names(&[name.into()], &[TABLE]);
            assert_eq!(result.is_err(), is_slip, "{name}");
        }
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        const TABLE: &[Field] = &[
            field("n", Kind::Int(1, 8), ""),
            field("t", Kind::Number(0.0, 2.0), ""),
            field("stop", Kind::Either(&[Kind::Text, Kind::List(&Kind::Text, 2)]), ""),
            field("mode", Kind::Word(&["a", "b"]), ""),
            field("on", Kind::Bool, ""),
            unsupported("plan", "it is too early"),
        ];
        let cases = [
            (json!({"n": 1, "t": 2, "stop": "x", "mode": "b", "on": false, "else": {"n": "?"}}), None),
            (json!({"n": 8.0, "t": null, "stop": ["x", "y"]}), None),
            (json!({"plan": false}), None),
            (json!({"plan": []}), None),
            (json!({"plan": true}), Some("`plan` is unsupported: it is too early")),
            (json!({"plan": {}}), Some("`plan` is unsupported: it is too early")),
            (json!({"n": 0}), Some("`n` must be a whole number from 1 to 8, it is 0")),
            (json!({"n": 1.5}), Some("`n` must be a whole number from 1 to 8, it is 1.5")),
            (json!({"n": u64::MAX}), Some("`n` must be a whole number from 1 to 8, it is 18446744073709551615")),
            (json!({"n": -1e300}), Some("`n` must be a whole number from 1 to 8, it is -1e+300")),
            (json!({"n": "1"}), Some("`n` must be a whole number from 1 to 8, it is \"1\"")),
            (json!({"t": "NaN"}), Some("`t` must be a number from 0 to 2, it is \"NaN\"")),
            (json!({"t": -0.1}), Some("`t` must be a number from 0 to 2, it is -0.1")),
            (json!({"stop": ["x", "y", "z"]}), Some("`stop` has 3 entries, at most 2 are allowed")),
            (json!({"stop": 5}), Some("`stop` must be a string or a list, each entry a string, it is 5")),
            (json!({"mode": "c"}), Some("`mode` must be one of a, b, it is \"c\"")),
            (json!({"on": 1}), Some("`on` must be true or false, it is 1")),
        ];
        for (body, expected) in cases {
            let result = check(body.as_object().unwrap(), &[TABLE]);
            assert_eq!(result.err().map(|e| e.message + &e.quote).as_deref(), expected, "{body}");
        }
    }
}
