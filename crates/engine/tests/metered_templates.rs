//! The second bound on a template's memory: with an allocator that counts, a render ends although none of its
//! operations pays for anything.

use std::time::{Duration, Instant};

use backend::meter::Meter;
use engine::template::{Chat, ChatTemplate, Error, Limits, Message};

#[global_allocator]
static ALLOCATOR: Meter = Meter;

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
