//! Responses that the server keeps (`--store-responses`), so that a conversation goes on by the id of its last answer.
//! They stay in memory up to a bound; those that were used longest ago are dropped. Each belongs to the key that asked
//! for it: for others it is not there. Knows conversations as JSON items, no engine.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::app;
use super::body;
use super::error::ApiError;
use super::fields::{Object, Read};
use super::limits::{MAX_BODY_BYTES, MAX_MESSAGES};
use super::worker::lock;

/// What a response and an item take besides their text, in bytes, at most: their entries in maps among it.
const RESPONSE_BYTES: usize = 512;
const ITEM_BYTES: usize = 256;

/// Whose a response is; 0 where the server needs no key.
pub type Owner = u64;

/// The responses of a server.
#[derive(Debug)]
pub struct Stored {
    /// Bytes that they may take.
    limit: usize,
    /// Bytes that they take.
    used: Arc<AtomicUsize>,
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    responses: HashMap<String, Response>,
    /// Ids of responses by their last use.
    uses: BTreeMap<u64, String>,
    n_uses: u64,
    /// Items by their owners and ids, some of which may be gone.
    items: HashMap<(Owner, String), Weak<Item>>,
    /// How many items there were after those that are gone were taken out.
    n_swept: usize,
}

#[derive(Debug)]
struct Response {
    owner: Owner,
    last_use: u64,
    /// The response without its output, JSON.
    head: String,
    /// The conversation as a whole: what it goes on with, the input, the output.
    items: Vec<Arc<Item>>,
    /// How many of them, the last ones, are the output.
    n_output: usize,
    _held: Held,
}

/// An item of conversations, which share it.
#[derive(Debug)]
struct Item {
    json: String,
    /// Bytes that it takes when it is parsed.
    parsed: usize,
    id: Option<String>,
    _held: Held,
}

/// Bytes that are counted as long as it lives.
#[derive(Debug)]
struct Held {
    bytes: usize,
    used: Arc<AtomicUsize>,
}

impl Held {
    fn new(bytes: usize, used: &Arc<AtomicUsize>) -> Held {
        used.fetch_add(bytes, Ordering::Relaxed);
        Held { bytes, used: used.clone() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A conversation whose answer is to be stored.
#[derive(Debug)]
pub struct Draft {
    stored: Arc<Stored>,
    owner: Owner,
    items: Vec<Arc<Item>>,
}

fn too_long() -> ApiError {
    let why =
        format!("the conversation is longer than {MAX_MESSAGES} items or {MAX_BODY_BYTES} bytes: start a new one");
    ApiError::bad(why)
}

/// Returns the error of an id under which nothing is stored, or nothing of this client's.
fn not_found(field: &str, code: &'static str) -> ApiError {
    let why = "names nothing that is stored: it may have been dropped for newer responses";
    ApiError { code: Some(code), ..ApiError::field(field, why) }
}

impl Stored {
    /// For responses of `limit` bytes together.
    pub fn new(limit: usize) -> Arc<Stored> {
        Arc::new(Stored { limit, used: Arc::default(), shelf: Mutex::default() })
    }

    fn item(&self, value: &Value) -> Arc<Item> {
        let mut json = value.to_string();
        let mut id = value["id"].as_str().map(String::from);
        if value.as_object().is_some_and(|fields| !fields.is_empty() && !fields.contains_key("id")) {
            let named =
                app::id(if value["type"].as_str().unwrap_or("message") == "message" { "msg_" } else { "item_" });
            json.insert_str(1, &format!("\"id\":\"{named}\","));
            id = Some(named);
        }
        let bytes = ITEM_BYTES + json.len() + 2 * id.as_ref().map_or(0, String::len);
        Arc::new(Item { parsed: ITEM_BYTES + body::cost(value), json, id, _held: Held::new(bytes, &self.used) })
    }

    /// Makes the `input` of a body the whole conversation: what `previous_response_id` names comes before it, and items
    /// that are referred to by their id replace the reference. `hold` is asked for the bytes that are added. Returns
    /// the conversation to be stored with its answer, unless the body asks for that not to be.
    ///
    /// # Errors
    /// 400 where an id names nothing, or the conversation is longer than any may be; those of `hold`.
    pub fn resume(
        self: &Arc<Stored>,
        body: &mut Object,
        owner: Owner,
        hold: impl FnOnce(usize) -> Result<(), ApiError>,
    ) -> Result<Option<Draft>, ApiError> {
        let stores = body.flag("store") != Some(false);
        let mut items = match body.text("previous_response_id") {
            Some(id) => self
                .conversation(id, owner)
                .ok_or_else(|| not_found("previous_response_id", "previous_response_not_found"))?,
            None => Vec::new(),
        };
        let own = match body.remove("input") {
            Some(Value::String(text)) => vec![json!({"type": "message", "role": "user", "content": text})],
            Some(Value::Array(list)) => list,
            other => {
                // The reader of inputs says what is wrong with it.
                body.extend(other.map(|other| ("input".into(), other)));
                return Ok(None);
            }
        };
        // A body may name one long item many times: all is counted before it is parsed.
        let (mut places, mut bytes, mut parsed) = (Vec::new(), 0, 0);
        let mut place = |item: &Arc<Item>| {
            bytes += item.json.len();
            parsed += item.parsed;
            if bytes <= MAX_BODY_BYTES { Ok(Err(item.clone())) } else { Err(too_long()) }
        };
        if items.len() + own.len() > MAX_MESSAGES {
            return Err(too_long());
        }
        for item in &items {
            places.push(place(item)?);
        }
        for (i, value) in own.into_iter().enumerate() {
            if value["type"] == "item_reference" {
                let item = value["id"].as_str().and_then(|id| self.named(id, owner));
                let item = item.ok_or_else(|| not_found(&format!("input[{i}].id"), "item_not_found"))?;
                places.push(place(&item)?);
                items.push(item);
            } else {
                if stores {
                    items.push(self.item(&value));
                }
                places.push(Ok(value));
            }
        }
        hold(parsed)?;
        // What is stored was parsed before.
        let read = |place: Result<Value, Arc<Item>>| match place {
            Ok(value) => value,
            Err(item) => serde_json::from_str(&item.json).unwrap_or_default(),
        };
        body.insert("input".into(), places.into_iter().map(read).collect());
        Ok(stores.then(|| Draft { stored: self.clone(), owner, items }))
    }

    /// Returns the items of a response and of what is before it.
    fn conversation(&self, id: &str, owner: Owner) -> Option<Vec<Arc<Item>>> {
        lock(&self.shelf).find(id, owner).map(|response| response.items.clone())
    }

    /// Returns the item with an id.
    fn named(&self, id: &str, owner: Owner) -> Option<Arc<Item>> {
        lock(&self.shelf).items.get(&(owner, id.into()))?.upgrade()
    }

    /// Returns a response as it was answered, without its log-probabilities.
    pub fn get(&self, id: &str, owner: Owner) -> Option<Value> {
        let (head, output) = {
            let mut shelf = lock(&self.shelf);
            let response = shelf.find(id, owner)?;
            let output = response.items.split_at_checked(response.items.len() - response.n_output)?.1.to_vec();
            (response.head.clone(), output)
        };
        let mut head: Value = serde_json::from_str(&head).ok()?;
        head["output"] = output.iter().filter_map(|item| serde_json::from_str::<Value>(&item.json).ok()).collect();
        Some(head)
    }

    /// Returns a list of the items that a response answers, the last one first unless they are to rise: at most `most`,
    /// after the one that is named.
    pub fn inputs(&self, id: &str, owner: Owner, after: Option<&str>, most: usize, rising: bool) -> Option<Value> {
        let mut items = {
            let mut shelf = lock(&self.shelf);
            let response = shelf.find(id, owner)?;
            response.items.iter().take(response.items.len() - response.n_output).cloned().collect::<Vec<_>>()
        };
        if !rising {
            items.reverse();
        }
        let place = |after| items.iter().position(|item| item.id.as_deref() == Some(after)).map(|i| i + 1);
        let first = after.map_or(Some(0), place).unwrap_or(items.len());
        let page = items.iter().skip(first).take(most);
        let data: Vec<Value> = page.filter_map(|item| Some(listed(serde_json::from_str(&item.json).ok()?))).collect();
        let named = |item: Option<&Value>| item.map(|item| item["id"].clone());
        Some(json!({"object": "list", "data": data, "first_id": named(data.first()), "last_id": named(data.last()),
            "has_more": items.len() > first + most}))
    }

    /// Drops a response. Those that go on with it keep its items.
    pub fn delete(&self, id: &str, owner: Owner) -> bool {
        let mut shelf = lock(&self.shelf);
        let is_there = shelf.find(id, owner).is_some();
        if is_there {
            shelf.drop_response(id);
        }
        is_there
    }
}

impl Draft {
    /// Stores the conversation with its answer: `head` is the response, whose output is `output`. What was used longest
    /// ago makes room; where the response alone is longer than the bound, it is dropped itself.
    pub fn keep(self, id: &str, head: &Object, output: &[Value]) {
        let Draft { stored, owner, mut items } = self;
        items.extend(output.iter().map(|value| stored.item(value)));
        let mut head = head.clone();
        head.insert("output".into(), json!([]));
        let head = Value::from(head).to_string();
        let bytes = RESPONSE_BYTES + head.len() + 3 * id.len() + size_of::<Arc<Item>>() * items.len();
        let held = Held::new(bytes, &stored.used);
        let mut shelf = lock(&stored.shelf);
        for item in &items {
            if let Some(id) = &item.id {
                shelf.items.insert((owner, id.clone()), Arc::downgrade(item));
            }
        }
        shelf.sweep();
        let last_use = shelf.next_use(id);
        let response = Response { owner, last_use, head, items, n_output: output.len(), _held: held };
        shelf.responses.insert(id.into(), response);
        while stored.used.load(Ordering::Relaxed) > stored.limit {
            let Some((_, oldest)) = shelf.uses.first_key_value() else { break };
            let oldest = oldest.clone();
            shelf.drop_response(&oldest);
        }
    }
}

impl Shelf {
    /// Notes a use of a response.
    fn next_use(&mut self, id: &str) -> u64 {
        self.n_uses += 1;
        self.uses.insert(self.n_uses, id.into());
        self.n_uses
    }

    /// Finds a response of this owner, and counts that as a use.
    fn find(&mut self, id: &str, owner: Owner) -> Option<&Response> {
        let last = self.responses.get(id).filter(|response| response.owner == owner)?.last_use;
        self.uses.remove(&last);
        let now = self.next_use(id);
        let response = self.responses.get_mut(id)?;
        response.last_use = now;
        Some(response)
    }

    fn drop_response(&mut self, id: &str) {
        let Some(response) = self.responses.remove(id) else { return };
        self.uses.remove(&response.last_use);
        drop(response);
        self.sweep();
    }

    /// Takes out items that are gone, when they may be half of all.
    fn sweep(&mut self) {
        if self.items.len() > 2 * self.n_swept + 64 || self.responses.is_empty() {
            self.items.retain(|_, item| item.strong_count() > 0);
            self.n_swept = self.items.len();
        }
    }
}

/// Returns an item as lists have it: messages say that they are some, and have parts.
fn listed(mut item: Value) -> Value {
    if item.get("type").is_none() {
        item["type"] = "message".into();
    }
    if let Some(text) = item["content"].as_str().filter(|_| item["type"] == "message") {
        let kind = if item["role"] == "assistant" { "output_text" } else { "input_text" };
        item["content"] = json!([{"type": kind, "text": text}]);
    }
    item
}

/// Returns the answer to a client that asks for a response which is not there.
pub fn no_such_response() -> ApiError {
    ApiError { code: Some("response_not_found"), ..ApiError::new(StatusCode::NOT_FOUND, "no such response is stored") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(value: Value) -> Object {
        value.as_object().cloned().unwrap()
    }

    /// Asks and is answered.
    fn turn(stored: &Arc<Stored>, id: &str, owner: Owner, request: Value) -> Result<Vec<String>, ApiError> {
        let mut request = body(request);
        let draft = stored.resume(&mut request, owner, |_| Ok(()))?;
        let text = |item: &Value| item["content"].as_str().unwrap_or_default().to_string();
        let seen = request["input"].as_array().unwrap().iter().map(text).collect();
        let answer = json!({"id": format!("msg_{id}"), "type": "message", "role": "assistant", "content": id});
        let output = [answer];
        if let Some(draft) = draft {
            draft.keep(id, &body(json!({"id": id, "status": "completed"})), &output);
        }
        Ok(seen)
    }

    #[test]
    fn conversations_go_on_by_the_id_of_their_last_answer() {
        let stored = Stored::new(1 << 20);
        let say = |text: &str, before: Option<&str>| json!({"input": text, "previous_response_id": before});
        assert_eq!(turn(&stored, "r1", 1, say("a", None)).unwrap(), ["a"]);
        assert_eq!(turn(&stored, "r2", 1, say("b", Some("r1"))).unwrap(), ["a", "r1", "b"]);
        // They fork, and belong to whom asked.
        assert_eq!(turn(&stored, "r3", 1, say("c", Some("r1"))).unwrap(), ["a", "r1", "c"]);
        assert_eq!(turn(&stored, "r4", 1, say("d", Some("r2"))).unwrap(), ["a", "r1", "b", "r2", "d"]);
        let error = turn(&stored, "r5", 2, say("e", Some("r1"))).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (400, Some("previous_response_not_found")));
        assert!(stored.get("r1", 2).is_none() && !stored.delete("r1", 2));
        assert_eq!(stored.get("r1", 1).unwrap()["output"][0]["content"], "r1");
        // Without its first answer the rest stands.
        assert!(stored.delete("r1", 1) && !stored.delete("r1", 1));
        assert_eq!(turn(&stored, "r6", 1, say("f", Some("r4"))).unwrap().len(), 7);

        let refer = |id: &str, owner| {
            turn(&stored, "r7", owner, json!({"input": [{"type": "item_reference", "id": id}], "store": false}))
        };
        assert_eq!(refer("msg_r3", 1).unwrap(), ["r3"]);
        assert!(refer("msg_r3", 2).is_err() && refer("msg_r7", 1).is_err());
        assert!(stored.get("r7", 1).is_none(), "what is not to be stored is not");
    }

    #[test]
    fn what_was_used_longest_ago_makes_room_and_all_is_counted() {
        let stored = Stored::new(64 << 10);
        let text = "x".repeat(10 << 10);
        for i in 0..50 {
            turn(&stored, &format!("r{i}"), 0, json!({"input": text})).unwrap();
            assert!(stored.used.load(Ordering::Relaxed) <= 64 << 10);
            // One is used again and again.
            assert!(stored.get("r0", 0).is_some(), "{i}");
        }
        assert!(stored.get("r49", 0).is_some() && stored.get("r40", 0).is_none());
        // A chain shares its items, and one that is too long is not kept.
        let mut last = "r49".to_string();
        for i in 50..200 {
            let id = format!("r{i}");
            match turn(&stored, &id, 0, json!({"input": text, "previous_response_id": last})) {
                Ok(_) => last = id,
                Err(_) => break,
            }
            assert!(stored.used.load(Ordering::Relaxed) <= 64 << 10);
        }
        assert!(last.as_str() < "r60", "{last}");
        let ids: Vec<String> = lock(&stored.shelf).responses.keys().cloned().collect();
        assert!(ids.iter().all(|id| stored.delete(id, 0)));
        let shelf = lock(&stored.shelf);
        assert_eq!((stored.used.load(Ordering::Relaxed), shelf.uses.len(), shelf.items.len()), (0, 0, 0));
    }

    #[test]
    fn long_conversations_are_refused_before_they_are_built() {
        let stored = Stored::new(64 << 20);
        let half = "x".repeat(MAX_BODY_BYTES / 2 + 1);
        turn(&stored, "r1", 0, json!({"input": half})).unwrap();
        turn(&stored, "r2", 0, json!({"input": half, "previous_response_id": "r1"})).unwrap();
        let error = turn(&stored, "r3", 0, json!({"input": "x", "previous_response_id": "r2"})).unwrap_err();
        assert!(error.message.contains("longer than"), "{}", error.message);
        let many = vec![json!({"type": "item_reference", "id": "msg_r1"}); MAX_MESSAGES + 1];
        assert!(turn(&stored, "r4", 0, json!({"input": many})).is_err());
        // What it takes is asked for first.
        let mut request = body(json!({"input": "x", "previous_response_id": "r1"}));
        let full = |bytes: usize| {
            assert!(bytes > half.len());
            Err(ApiError::busy("full", 1))
        };
        assert_eq!(stored.resume(&mut request, 0, full).unwrap_err().status, 429);
    }
}
