//! Models in C programs: the functions of `include/moebius.h` over [`moebius::local`]. The header says what they do and
//! what their callers promise. Pointers become references here and nowhere else, and a panic ends at the border, as an
//! error.
#![allow(clippy::missing_safety_doc)]

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use moebius::local::{About, Call, Got, Local};
use serde_json::{Map, Value, json};

#[global_allocator]
static ALLOCATOR: moebius::Allocator = moebius::Allocator;

const OK: c_int = 0;
const FAILED: c_int = 1;
const STOPPED: c_int = 2;

/// How long a wait for the engine lasts before it is begun anew.
const PATIENCE: Duration = Duration::from_secs(1);
/// Most bytes of an event, and of an answer that says no.
const MAX_BYTES: usize = 64 << 20;

/// A loaded model.
pub struct Model(Arc<Local>);

/// A caller's function for pieces.
type Piece = Option<unsafe extern "C" fn(*const c_char, usize, *mut c_void) -> c_int>;

/// The version, for nobody to free.
#[unsafe(no_mangle)]
pub extern "C" fn moebius_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Loads a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_open(flags: *const *const c_char, n: usize, error: *mut *mut c_char) -> *mut Model {
    let mut model = std::ptr::null_mut();
    let open = || -> Result<c_int> {
        // SAFETY: the caller's promise; where there are no flags, none are read.
        let words = (0..n).map(|i| unsafe { Ok(OsString::from(text(*some(flags, "flags")?.add(i), "a flag")?)) });
        model = Box::into_raw(Box::new(Model(Local::open(words.collect::<Result<_>>()?)?)));
        Ok(OK)
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, open) };
    model
}

/// Ends a model and frees it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_close(model: *mut Model) {
    if !model.is_null() {
        // SAFETY: it is of `moebius_open`, and the caller promises that nobody uses it. There is nobody to tell.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(model) })));
    }
}

/// Tokens of the vocabulary; 0 of NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_n_vocab(model: *const Model) -> usize {
    // SAFETY: the caller's promise.
    unsafe { about(model) }.map_or(0, |about| about.vocabulary)
}

/// Most tokens of a prompt and its answer; 0 of NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_n_ctx(model: *const Model) -> usize {
    // SAFETY: the caller's promise.
    unsafe { about(model) }.map_or(0, |about| about.context)
}

/// Answers a prompt.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_generate(
    model: *const Model,
    prompt: *const c_char,
    settings: *const c_char,
    piece: Piece,
    user: *mut c_void,
    error: *mut *mut c_char,
) -> c_int {
    let generate = || -> Result<c_int> {
        // SAFETY: the caller's promise.
        let (model, prompt) = unsafe { (&*some(model, "the model")?, text(prompt, "the prompt")?) };
        // SAFETY: as above.
        let settings = if settings.is_null() { "{}" } else { unsafe { text(settings, "settings") }? };
        let mut body: Map<String, Value> =
            serde_json::from_str(settings).context("failed to read the settings, a JSON object")?;
        body.insert("stream".into(), true.into());
        let path = if model.0.about().has_chat_template {
            body.insert("messages".into(), json!([{"role": "user", "content": prompt}]));
            "/v1/chat/completions"
        } else {
            body.insert("prompt".into(), prompt.into());
            "/v1/completions"
        };
        let (mut rest, mut refused) = (Vec::new(), false);
        let done = answer(model.0.call(path, Some(Value::Object(body).to_string()))?, |status, bytes| {
            rest.extend_from_slice(bytes);
            refused = status != 200;
            ensure!(rest.len() <= MAX_BYTES, "failed to read the answer: more than {MAX_BYTES} bytes without an end");
            while let (false, Some(end)) = (refused, rest.windows(2).position(|two| two == b"\n\n")) {
                let event: Vec<u8> = rest.drain(..end + 2).collect();
                let Some(said) = content(&event)? else { continue };
                // SAFETY: the caller's promise.
                if unsafe { give(piece, said.as_bytes(), user) }? {
                    return Ok(true);
                }
            }
            Ok(false)
        })?;
        ensure!(!refused, "failed to generate: {}", refusal(&rest));
        Ok(done)
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, generate) }
}

/// Asks a route.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_request(
    model: *const Model,
    path: *const c_char,
    body: *const c_char,
    status: *mut c_int,
    piece: Piece,
    user: *mut c_void,
    error: *mut *mut c_char,
) -> c_int {
    let request = || -> Result<c_int> {
        // SAFETY: the caller's promise.
        let (model, path) = unsafe { (&*some(model, "the model")?, text(path, "the path")?) };
        // SAFETY: as above.
        let body = if body.is_null() { None } else { Some(unsafe { text(body, "the body") }?.to_string()) };
        answer(model.0.call(path, body)?, |head, bytes| {
            if !status.is_null() {
                // SAFETY: the caller's promise.
                unsafe { status.write(head.into()) };
            }
            // SAFETY: as above.
            Ok(!bytes.is_empty() && unsafe { give(piece, bytes, user) }?)
        })
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, request) }
}

/// Logits behind each token.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_logits(
    model: *const Model,
    tokens: *const u32,
    n: usize,
    out: *mut f32,
    n_out: usize,
    error: *mut *mut c_char,
) -> c_int {
    let logits = || -> Result<c_int> {
        // SAFETY: the caller's promise.
        let model = unsafe { &*some(model, "the model")? };
        let About { vocabulary, context, .. } = model.0.about();
        ensure!((1..=context).contains(&n), "failed to compute logits: {n} tokens were given, expected 1 to {context}");
        ensure!(
            n_out == n * vocabulary,
            "failed to compute logits: there is room for {n_out} floats, expected {n} rows of {vocabulary}"
        );
        // SAFETY: the caller's promise.
        let tokens = unsafe { std::slice::from_raw_parts(some(tokens, "tokens")?, n) };
        let (logits, out) = (model.0.logits(tokens, 0, n)?, some(out, "out")?.cast_mut());
        ensure!(logits.len() == n_out, "failed to compute logits: {} floats came of {n_out}", logits.len());
        // SAFETY: the caller's promise, and that the numbers are as many.
        unsafe { std::ptr::copy_nonoverlapping(logits.as_ptr(), out, n_out) };
        Ok(OK)
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, logits) }
}

/// Frees an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moebius_free_text(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it is of `guarded`, and the caller promises that it was not freed.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Runs what may fail or panic; the reason goes to `error`, which is null or can be written.
unsafe fn guarded(error: *mut *mut c_char, work: impl FnOnce() -> Result<c_int>) -> c_int {
    let (status, said) = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(status)) => (status, None),
        Ok(Err(why)) => (FAILED, Some(moebius::causes(&why))),
        Err(_) => (FAILED, Some("failed by a mistake in the library, which is told on stderr".to_string())),
    };
    if !error.is_null() {
        let text = |said: String| CString::new(said.replace('\0', "\u{fffd}")).unwrap_or_default().into_raw();
        // SAFETY: the caller's promise.
        unsafe { error.write(said.map_or(std::ptr::null_mut(), text)) };
    }
    status
}

/// A pointer that is not null.
fn some<T>(pointer: *const T, what: &str) -> Result<*const T> {
    ensure!(!pointer.is_null(), "failed to use {what}: it is NULL");
    Ok(pointer)
}

/// A text of the caller's, which is null or stays as long as the call.
unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(some(pointer, what)?) }.to_str().with_context(|| format!("failed to read {what} as UTF-8"))
}

/// What the model is.
unsafe fn about(model: *const Model) -> Option<About> {
    // SAFETY: null, or an open model, as callers promise.
    let model = unsafe { model.as_ref() }?;
    catch_unwind(AssertUnwindSafe(|| model.0.about())).ok()
}

/// Gives `each` the status and the pieces of an answer, first an empty one, until it says that it has enough.
fn answer(mut call: Call, mut each: impl FnMut(u16, &[u8]) -> Result<bool>) -> Result<c_int> {
    let mut status = 0;
    loop {
        let has_enough = match call.wait(PATIENCE) {
            Got::Nothing => false,
            Got::Head { status: head, .. } => {
                status = head;
                each(status, &[])?
            }
            Got::Piece(bytes) => each(status, &bytes)?,
            Got::End => return Ok(OK),
        };
        if has_enough {
            return Ok(STOPPED);
        }
    }
}

/// Gives a piece to the caller's function, a zero behind it; whether that is enough.
unsafe fn give(piece: Piece, bytes: &[u8], user: *mut c_void) -> Result<bool> {
    let Some(piece) = piece else { bail!("failed to deliver a piece of the answer: the function is NULL") };
    let text = [bytes, b"\0"].concat();
    // SAFETY: the caller's promise; the bytes live until it returns.
    Ok(unsafe { piece(text.as_ptr().cast(), bytes.len(), user) } != 0)
}

/// The text of an event of a streamed answer, where it brings some.
fn content(event: &[u8]) -> Result<Option<String>> {
    let event = std::str::from_utf8(event).context("failed to read the answer")?;
    let Some(data) = event.trim_end().strip_prefix("data: ").filter(|data| *data != "[DONE]") else { return Ok(None) };
    let event: Value = serde_json::from_str(data).context("failed to read the answer")?;
    ensure!(event.get("error").is_none(), "failed to generate: {}", refusal(data.as_bytes()));
    let choice = &event["choices"][0];
    let said = choice["delta"]["content"].as_str().or(choice["text"].as_str());
    Ok(said.filter(|said| !said.is_empty()).map(str::to_string))
}

/// Why a request was refused.
fn refusal(body: &[u8]) -> String {
    let error: Value = serde_json::from_slice(body).unwrap_or_default();
    let said = error["error"]["message"].as_str().map(str::to_string);
    said.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned())
}
