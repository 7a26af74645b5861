//! The second bound on a template's memory: with an allocator that counts, a render ends although none of its
//! operations pays for anything. And whose time a render takes: the processor's.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use engine::template::{Chat, ChatTemplate, Error, Limits, Message};
use sys::meter::Meter;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// One test at a time: one looks at the clock, the other keeps the machine busy.
static ALONE: Mutex<()> = Mutex::new(());

const HELD: usize = 64 << 20;

/// Nothing is charged: as if every operation were missing from the list of those that pay.
const LIMITS: Limits = Limits {
    output_bytes: usize::MAX,
    built_bytes: usize::MAX,
    touched_bytes: usize::MAX,
    held_bytes: HELD,
    fuel: 100_000_000,
    time: Duration::from_secs(3),
};

/// Most memory that the process has had, in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok()).map_or(0, |kb| kb << 10)
}

fn render(source: &str) -> (Result<String, Error>, ChatTemplate) {
    let template = ChatTemplate::with_limits(source, "", "", LIMITS).expect("a template");
    let messages = Message::to_json(&[Message::new("user", "hi")]);
    (template.render(&Chat::new(&messages)), template)
}

#[test]
fn what_nobody_pays_for_ends_too() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cases = [
        "{% set s = 'a' * 1000000 %}{{ ([s] * 1000) | map('upper') | list | length }}",
        "{% set s = 'a' * 1000000 %}{{ ([s] * 1000) | map('list') | list | length }}",
        "{{ ([range(100000)] * 100000) | map('list') | list | length }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(100) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}",
    ];
    for source in cases {
        let error = render(source).0.expect_err(source);
        assert!(
            matches!(&error, Error::Limit { message, .. } if message.contains("holds more than")),
            "{source}: {error}"
        );
    }
    assert!(peak() < 6 * HELD, "{} MB", peak() >> 20);
    // In this order, as peaks do not go down: one operation that takes more than twice the limit at once cannot be
    // told, so that its thread stops there.
    let (begin, before) = (Instant::now(), peak());
    let (outcome, template) = render("{% if messages | length > 1 %}fine{% else %}{{ 'a' * 3000000000 }}{% endif %}");
    let error = outcome.expect_err("the thread stopped");
    assert!(error.to_string().contains("given up") && begin.elapsed() < Duration::from_secs(12), "{error}");
    assert!(peak() < before + HELD, "{} MB", peak() >> 20);
    // Others go on.
    let two = Message::to_json(&[Message::new("user", "hi"), Message::new("user", "hi")]);
    assert_eq!(template.render(&Chat::new(&two)).as_deref(), Ok("fine"));
}

/// A render that others keep from the processor for longer than its limit ends as it does alone.
#[test]
#[cfg(target_os = "linux")]
fn a_busy_machine_takes_no_time_from_a_render() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let limits = Limits { time: Duration::from_millis(600), ..LIMITS };
    let source = "{% for i in range(100000) %}{% if i is odd and i > 7 %}{{ i }}{% endif %}{% endfor %}";
    let template = ChatTemplate::with_limits(source, "", "", limits).expect("a template");
    let messages = Message::to_json(&[Message::new("user", "hi")]);
    let chat = Chat::new(&messages);
    let text = template.render(&chat).expect("alone");
    let is_over = AtomicBool::new(false);
    let n_busy = 24 * thread::available_parallelism().map_or(1, usize::from);
    let (result, took) = thread::scope(|scope| {
        for _ in 0..n_busy {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        let begin = Instant::now();
        let result = template.render(&chat);
        is_over.store(true, Relaxed);
        (result, begin.elapsed())
    });
    println!("{took:?} beside {n_busy} busy threads");
    assert_eq!(result, Ok(text));
}
