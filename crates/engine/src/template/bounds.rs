//! What a render may spend, and how a compiled template is made to pay for it. Knows instructions and sizes, nothing of
//! chats.
//!
//! minijinja counts instructions (fuel), but one instruction may double a string, compare a hundred thousand copies of
//! it or print a list that contains itself. So the compiled instructions are rewritten before they run: what can build,
//! read, compare or hash a value calls one of our functions instead, which pays for the bytes and items it touches.
//! Filters, tests, functions and methods are those that [`super::env`] registers, each with what it touches. The names
//! of our functions hold a `!`, which no template can spell, so no template can replace them.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use sys::{meter, rank};

/// Longest template source accepted, in bytes.
pub const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Longest text a template may write, and longest string it may build, in bytes.
pub const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// Sum of the sizes of all values built during one render, in bytes.
pub const MAX_BUILT_BYTES: usize = 256 << 20;
/// Sum of what all operations of one render read, in bytes; an item of a list or mapping counts as [`ITEM_BYTES`].
pub const MAX_TOUCHED_BYTES: usize = 1 << 30;
/// What a render may hold at a time, in bytes, as the allocator counts it: a second bound that needs no account of
/// operations, in programs that install [`sys::meter::Meter`].
pub const MAX_HELD_BYTES: usize = 512 << 20;
/// Instructions one render may execute.
pub const MAX_FUEL: u64 = 4_000_000;
/// How deep lists and mappings may nest.
pub const MAX_DEPTH: usize = 100;
/// Longest name of a variable, attribute, filter or method, in bytes: each instruction hashes or compares its name.
pub const MAX_NAME_BYTES: usize = 256;
/// Processor's time of one render (of the clock where the system does not tell): a net under the other limits, which
/// normally end a hostile template far earlier. A busy machine takes nothing from it.
pub const MAX_TIME: Duration = Duration::from_secs(3);
/// What an item of a list or mapping counts for.
pub const ITEM_BYTES: usize = 32;

/// What one render may spend. What stands in a limit is never exceeded by more than one operation on one string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest text written, and longest string built, in bytes.
    pub output_bytes: usize,
    /// Sum of the sizes of all values built, in bytes.
    pub built_bytes: usize,
    /// Sum of what all operations read, in bytes.
    pub touched_bytes: usize,
    /// What is held at a time, in bytes, as the allocator counts it.
    pub held_bytes: usize,
    /// Instructions executed.
    pub fuel: u64,
    /// The processor's time.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            output_bytes: MAX_OUTPUT_BYTES,
            built_bytes: MAX_BUILT_BYTES,
            touched_bytes: MAX_TOUCHED_BYTES,
            held_bytes: MAX_HELD_BYTES,
            fuel: MAX_FUEL,
            time: MAX_TIME,
        }
    }
}

/// What the running render has left. One render runs on one thread, from [`start`] to its end.
struct Budget {
    limits: Limits,
    built: usize,
    touched: usize,
    output: usize,
    work: Arc<rank::Work>,
    calls: u32,
    /// The text given to `raise_exception`.
    raised: Option<String>,
    /// The limit that ended the render.
    limit: Option<String>,
    now: Option<jiff::civil::DateTime>,
}

thread_local! {
    static BUDGET: RefCell<Option<Budget>> = const { RefCell::new(None) };
}

/// Opens the budget of a render on this thread, which is at `work`; `now` fixes its clock.
pub fn start(limits: Limits, work: Arc<rank::Work>, now: Option<jiff::civil::DateTime>) {
    let budget = Budget {
        limits,
        built: limits.built_bytes,
        touched: limits.touched_bytes,
        output: limits.output_bytes,
        work,
        calls: 0,
        raised: None,
        limit: None,
        now,
    };
    BUDGET.with_borrow_mut(|b| *b = Some(budget));
}

/// Closes the budget: the text given to `raise_exception` and the limit that was hit, if any.
pub fn finish() -> (Option<String>, Option<String>) {
    BUDGET.with_borrow_mut(|b| b.take()).map_or((None, None), |b| (b.raised, b.limit))
}

/// Longest string of this render, in bytes.
pub fn max_string() -> usize {
    BUDGET.with_borrow(|b| b.as_ref().map_or(MAX_OUTPUT_BYTES, |b| b.limits.output_bytes))
}

/// Returns the fixed clock of this render.
pub fn fixed_now() -> Option<jiff::civil::DateTime> {
    BUDGET.with_borrow(|b| b.as_ref().and_then(|b| b.now))
}

/// Remembers a `raise_exception` and makes the error that ends the render.
pub fn raise(message: &str) -> Error {
    BUDGET.with_borrow_mut(|b| {
        if let Some(b) = b {
            b.raised = Some(message.to_owned());
        }
    });
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}

/// Returns the error of a limit, remembered so that it is reported as one.
pub fn over(limit: String) -> Error {
    BUDGET.with_borrow_mut(|b| {
        if let Some(b) = b {
            b.limit.get_or_insert_with(|| limit.clone());
        }
    });
    Error::new(ErrorKind::InvalidOperation, limit)
}

fn spend(built: usize, touched: usize, look: bool) -> Result<(), Error> {
    let state = BUDGET.with_borrow_mut(|b| {
        let Some(b) = b else { return Ok(()) };
        b.built = b
            .built
            .checked_sub(built)
            .ok_or_else(|| format!("builds more than {} bytes of values", b.limits.built_bytes))?;
        b.touched = b
            .touched
            .checked_sub(touched)
            .ok_or_else(|| format!("reads more than {} bytes of values", b.limits.touched_bytes))?;
        if meter::exceeded() {
            return Err(format!("holds more than {} bytes", b.limits.held_bytes));
        }
        b.calls = b.calls.wrapping_add(1);
        // The clock is read for every 64th small charge, and for every large one.
        let looks = look || b.calls % 64 == 0 || touched > 4096;
        match looks && b.work.took().is_some_and(|took| took > b.limits.time) {
            true => Err(format!("runs longer than {:?}", b.limits.time)),
            false => Ok(()),
        }
    });
    state.map_err(|what| over(format!("the template {what}")))
}

/// Pays for `bytes` of newly built values, and looks at the clock.
///
/// # Errors
/// The budget of bytes or of time is used up.
pub fn charge(bytes: usize) -> Result<(), Error> {
    spend(bytes, bytes, false)
}

/// Pays for `n` items of a list or mapping that is about to be built.
///
/// # Errors
/// As [`charge`].
pub fn charge_items(n: usize) -> Result<(), Error> {
    charge(n.saturating_mul(ITEM_BYTES))
}

/// Pays for reading `bytes` that exist already, and looks at the clock.
///
/// # Errors
/// The budget of reading or of time is used up.
pub fn touch(bytes: usize) -> Result<(), Error> {
    spend(0, bytes, false)
}

/// Pays for one round of a loop, and looks at the clock.
///
/// # Errors
/// As [`touch`].
pub fn tick() -> Result<(), Error> {
    spend(0, ITEM_BYTES, true)
}

/// Checks the length of a string before it is built, and pays for it.
///
/// # Errors
/// The string is longer than [`Limits::output_bytes`], or the budget is used up.
pub fn charge_string(bytes: usize) -> Result<(), Error> {
    let most = max_string();
    if bytes > most {
        return Err(over(format!("the template builds a string of {bytes} bytes, at most {most} are allowed")));
    }
    charge(bytes)
}

/// Pays for text that the template writes.
///
/// # Errors
/// More than [`Limits::output_bytes`] were written, or the budget is used up.
pub fn charge_output(bytes: usize) -> Result<(), Error> {
    let fits = BUDGET.with_borrow_mut(|b| match b {
        Some(b) => b.output.checked_sub(bytes).map(|left| b.output = left).is_some(),
        None => true,
    });
    if !fits {
        return Err(over(format!("the template writes more than {} bytes", max_string())));
    }
    charge(bytes)
}

/// Returns what the outermost layer of a value takes, in bytes; 0 for a lazy list, whose length is not known.
fn layer(value: &Value) -> usize {
    match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => value.len().unwrap_or(0).saturating_mul(ITEM_BYTES),
        _ => 0,
    }
}

/// Pays for the outermost layer of a value that was built.
///
/// # Errors
/// As [`charge`].
pub fn charge_value(value: &Value) -> Result<(), Error> {
    charge(layer(value))
}

/// Pays for reading the outermost layer of a value.
///
/// # Errors
/// As [`touch`].
pub fn touch_value(value: &Value) -> Result<(), Error> {
    touch(layer(value))
}

/// Walks a value as a tree, paying for every node and every byte of text, so that whatever walks it next (comparison,
/// hashing, printing) is known to end. A part that is shared counts as often as it is reached. Returns what was paid.
///
/// # Errors
/// The value nests deeper than [`MAX_DEPTH`] (or contains itself), or the budget is used up.
pub fn walk(value: &Value) -> Result<usize, Error> {
    let mut paid = 0;
    visit(value, 0, &mut |v| {
        let bytes = ITEM_BYTES + v.as_str().map_or(0, str::len);
        paid += bytes;
        touch(bytes)
    })?;
    Ok(paid)
}

/// Calls `each` with every node of a value, paying 32 bytes a node.
///
/// # Errors
/// As [`walk`], and what `each` returns.
pub fn visit(value: &Value, depth: usize, each: &mut dyn FnMut(&Value) -> Result<(), Error>) -> Result<(), Error> {
    each(value)?;
    let is_map = match value.kind() {
        ValueKind::Map => true,
        ValueKind::Seq | ValueKind::Iterable => false,
        _ => return Ok(()),
    };
    if depth >= MAX_DEPTH {
        return Err(over(format!("the template nests values deeper than {MAX_DEPTH}")));
    }
    for item in value.try_iter()? {
        touch(ITEM_BYTES)?;
        if is_map {
            visit(&value.get_item(&item)?, depth + 1, each)?;
        }
        visit(&item, depth + 1, each)?;
    }
    Ok(())
}

/// Rewrites compiled instructions so that they pay for what they build and read. Jump targets and lines are kept.
///
/// # Errors
/// A name is longer than [`MAX_NAME_BYTES`].
pub fn rewrite<'a>(from: &Instructions<'a>) -> Result<Instructions<'a>, Error> {
    let mut len = 0;
    let all: Vec<&Instruction<'a>> = std::iter::from_fn(|| {
        let i = from.get(len);
        len += 1;
        i
    })
    .collect();
    if let Some(name) = all.iter().filter_map(|i| name(i)).find(|name| name.len() > MAX_NAME_BYTES) {
        let bytes = name.len();
        return Err(over(format!("a name of the template has {bytes} bytes, at most {MAX_NAME_BYTES} are allowed")));
    }
    let mut start = Vec::with_capacity(all.len() + 1); // where each old instruction begins in the new order
    let mut next = 0;
    for i in &all {
        start.push(next);
        next += expand(i).len() as u32;
    }
    start.push(next);
    let target = |old: &u32| start.get(*old as usize).copied().unwrap_or(next);

    let mut to = Instructions::new(from.name(), from.source());
    for (idx, i) in all.iter().enumerate() {
        for mut new in expand(i) {
            match &mut new {
                Instruction::Iterate(t)
                | Instruction::Jump(t)
                | Instruction::JumpIfFalse(t)
                | Instruction::JumpIfFalseOrPop(t)
                | Instruction::JumpIfTrueOrPop(t)
                | Instruction::BuildMacro(_, t, _) => *t = target(t),
                _ => {}
            }
            match from.get_line(idx as u32) {
                Some(line) => to.add_with_line(new, u16::try_from(line).unwrap_or(u16::MAX)),
                None => to.add(new),
            };
        }
    }
    Ok(to)
}

/// Returns the name that an instruction looks up each time it runs.
fn name<'a>(i: &Instruction<'a>) -> Option<&'a str> {
    match i {
        Instruction::Lookup(name)
        | Instruction::StoreLocal(name)
        | Instruction::GetAttr(name)
        | Instruction::SetAttr(name)
        | Instruction::Enclose(name)
        | Instruction::CallFunction(name, _)
        | Instruction::CallMethod(name, _)
        | Instruction::ApplyFilter(name, ..)
        | Instruction::PerformTest(name, ..)
        | Instruction::BuildMacro(name, ..)
        | Instruction::CallBlock(name) => Some(name),
        _ => None,
    }
}

/// Returns what stands for one instruction after the rewrite. The stack before and after is the same.
fn expand<'a>(i: &Instruction<'a>) -> Vec<Instruction<'a>> {
    use minijinja::machinery::Instruction as I;
    let call = |name: &'static str, args: u16| I::CallFunction(name, Some(args));
    match i {
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        I::Add => vec![call("add!", 2)],
        I::Mul => vec![call("mul!", 2)],
        I::Rem => vec![call("rem!", 2)],
        I::StringConcat => vec![call("concat!", 2)],
        I::In => vec![call("in!", 2)],
        I::Eq => vec![call("eq!", 2)],
        I::Ne => vec![call("ne!", 2)],
        I::Lt => vec![call("lt!", 2)],
        I::Lte => vec![call("le!", 2)],
        I::Gt => vec![call("gt!", 2)],
        I::Gte => vec![call("ge!", 2)],
        // A chained comparison leaves its right side on the stack: both are walked first, then given back as they were.
        I::CompareAndPreserve(_) => vec![call("pair!", 2), I::UnpackList(2), I::Swap, i.clone()],
        I::Slice => vec![call("slice!", 4)],
        I::SetAttr(_) => vec![I::Swap, call("settable!", 1), I::Swap, i.clone()],
        I::GetItem => vec![call("item!", 2)],
        // Keys are hashed: they are paid for, and may not be lists or mappings, as in Python.
        I::BuildMap(n) => match u16::try_from(2 * n) {
            Ok(args) => vec![call("map!", args)],
            Err(_) => vec![call("refuse!", 0)],
        },
        I::MergeKwargs(_) => vec![i.clone(), call("keys!", 1)],
        I::UnpackLists(n) => match u16::try_from(*n) {
            Ok(lists) => vec![call("splat!", lists), I::UnpackLists(1)],
            Err(_) => vec![call("refuse!", 0)],
        },
        I::PushLoop(_) | I::UnpackList(_) | I::FastRecurse => vec![call("touch!", 1), i.clone()],
        I::Iterate(_) => vec![i.clone(), call("tick!", 0), I::DiscardTop],
        // `loop(..)` begins a loop over its argument, under whatever name.
        I::CallFunction(_, Some(1)) => vec![call("touch!", 1), i.clone(), call("charge!", 1)],
        // `loop.changed` compares its arguments with those of the round before.
        I::CallMethod("changed", Some(n)) => vec![call("changed!", *n)],
        I::CallMethod("changed", None) => vec![call("refuse!", 0)],
        // Filters, tests and methods pay for themselves (`env`).
        I::BuildList(_) | I::BuildTuple(_) | I::CallFunction(..) | I::CallObject(..) | I::EndCapture => {
            vec![i.clone(), call("charge!", 1)]
        }
        _ => vec![i.clone()],
    }
}
