//! What a render may spend, and how a compiled template is made to pay for it. Knows instructions and sizes, nothing of chats.
//!
//! minijinja counts instructions (fuel), but one instruction may double a string, repeat it a hundred million times or print a
//! list that contains itself. So the compiled instructions are rewritten before they run: what can grow a value calls one of our
//! functions instead, and what any filter, method or function returns is charged to the budget of the render.
//! The names of these functions hold a `!`, which no template can spell, so no template can replace them.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Longest template source accepted, in bytes.
pub const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Longest text a template may write, and longest string it may build, in bytes.
pub const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// Sum of the sizes of all values built during one render, in bytes.
pub const MAX_BUILT_BYTES: usize = 256 << 20;
/// Instructions one render may execute.
pub const MAX_FUEL: u64 = 4_000_000;
/// How deep lists and mappings may nest.
pub const MAX_DEPTH: usize = 100;
/// Wall-clock limit of one render: a net under the other limits, which normally end a hostile template far earlier.
pub const MAX_TIME: Duration = Duration::from_secs(3);

/// What the running render has left. One render runs on one thread, from [`start`] to its end.
struct Budget {
    bytes: usize,
    output: usize,
    end: Instant,
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

/// Opens the budget of a render on this thread; `now` fixes its clock.
pub fn start(now: Option<jiff::civil::DateTime>) {
    let budget = Budget {
        bytes: MAX_BUILT_BYTES,
        output: MAX_OUTPUT_BYTES,
        end: Instant::now() + MAX_TIME,
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

/// The fixed clock of this render.
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

/// The error of a limit, remembered so that it is reported as one.
pub fn over(limit: String) -> Error {
    BUDGET.with_borrow_mut(|b| {
        if let Some(b) = b {
            b.limit.get_or_insert_with(|| limit.clone());
        }
    });
    Error::new(ErrorKind::InvalidOperation, limit)
}

/// Pays for `bytes` of newly built values, and looks at the clock.
///
/// # Errors
/// The budget of bytes or of time is used up.
pub fn charge(bytes: usize) -> Result<(), Error> {
    let state = BUDGET.with_borrow_mut(|b| {
        let Some(b) = b else { return Ok(()) };
        b.bytes = b.bytes.checked_sub(bytes).ok_or(true)?;
        b.calls = b.calls.wrapping_add(1);
        // The clock is read for every 64th small charge, and for every large one.
        if (b.calls % 64 == 0 || bytes > 4096) && Instant::now() > b.end { Err(false) } else { Ok(()) }
    });
    state.map_err(|memory| {
        over(match memory {
            true => format!("the template builds more than {MAX_BUILT_BYTES} bytes of values"),
            false => format!("the template runs longer than {} seconds", MAX_TIME.as_secs()),
        })
    })
}

/// Checks the length of a string before it is built, and pays for it.
///
/// # Errors
/// The string is longer than [`MAX_OUTPUT_BYTES`], or the budget is used up.
pub fn charge_string(bytes: usize) -> Result<(), Error> {
    if bytes > MAX_OUTPUT_BYTES {
        return Err(over(format!(
            "the template builds a string of {bytes} bytes, at most {MAX_OUTPUT_BYTES} are allowed"
        )));
    }
    charge(bytes)
}

/// Pays for text that the template writes.
///
/// # Errors
/// More than [`MAX_OUTPUT_BYTES`] were written, or the budget is used up.
pub fn charge_output(bytes: usize) -> Result<(), Error> {
    let fits = BUDGET.with_borrow_mut(|b| match b {
        Some(b) => b.output.checked_sub(bytes).map(|left| b.output = left).is_some(),
        None => true,
    });
    if !fits {
        return Err(over(format!("the template writes more than {MAX_OUTPUT_BYTES} bytes")));
    }
    charge(bytes)
}

/// Pays for the outermost layer of a value that a filter, method or function returned.
pub fn charge_value(value: &Value) -> Result<(), Error> {
    let bytes = match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Map => value.len().unwrap_or(0).saturating_mul(32),
        _ => 0,
    };
    charge(bytes)
}

/// Walks a value as a tree, paying for every node, so that whatever walks it next (comparison, printing) is known to end.
///
/// # Errors
/// The value nests deeper than [`MAX_DEPTH`] (or contains itself), or has more nodes than the budget allows.
pub fn walk(value: &Value, depth: usize) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    if depth >= MAX_DEPTH {
        return Err(over(format!("the template nests values deeper than {MAX_DEPTH}")));
    }
    let is_map = value.kind() == ValueKind::Map;
    for item in value.try_iter()? {
        charge(32)?;
        if is_map {
            walk(&value.get_item(&item)?, depth + 1)?;
        } else {
            walk(&item, depth + 1)?;
        }
    }
    Ok(())
}

/// Rewrites compiled instructions so that they pay for what they build. Jump targets and lines are kept.
pub fn rewrite<'a>(from: &Instructions<'a>) -> Instructions<'a> {
    let mut len = 0;
    let all: Vec<&Instruction<'a>> = std::iter::from_fn(|| {
        let i = from.get(len);
        len += 1;
        i
    })
    .collect();
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
    to
}

/// What stands for one instruction after the rewrite. The stack before and after is the same.
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
        I::BuildMap(_)
        | I::BuildList(_)
        | I::BuildTuple(_)
        | I::GetItem
        | I::ApplyFilter(..)
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(..)
        | I::EndCapture => vec![i.clone(), call("charge!", 1)],
        I::PerformTest(..) | I::PushLoop(_) => vec![i.clone(), call("tick!", 0), I::DiscardTop],
        _ => vec![i.clone()],
    }
}
