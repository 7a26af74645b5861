//! Every filter, test, method and operator, on values of every size and with shared parts, alone and in loops: a render
//! ends within its limits of time and memory, whatever it does. The limits are small here, so that thousands of
//! templates take seconds; what escapes them is over by orders of magnitude.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use engine::template::{Chat, ChatTemplate, Error, Limits, Message};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call goes to the system allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LIMITS: Limits = Limits {
    output_bytes: 256 << 10,
    built_bytes: 4 << 20,
    touched_bytes: 16 << 20,
    held_bytes: usize::MAX,
    fuel: 100_000,
    time: Duration::from_millis(800),
};
/// Values that are built twice over on the way, text that is escaped, slack of vectors: a fixed factor.
const MAX_LIVE: usize = 8 * LIMITS.built_bytes;

/// How a value is made and what it is called then.
const VALUES: &[(&str, &str)] = &[
    ("short text", "{% set v = 'ab c' %}"),
    ("long text", "{% set v = 'a' * 250000 %}"),
    ("words", "{% set v = 'a b\\n' * 60000 %}"),
    ("wide text", "{% set v = 'ŉß<' * 50000 %}"),
    ("number", "{% set v = 170141183460469231731687303715884105727 %}"),
    ("small list", "{% set v = [3, 'x', 1.5, none] %}"),
    ("range", "{% set v = range(100000) %}"),
    ("long list", "{% set v = range(20000) | list %}"),
    ("one long text often", "{% set s = 'a' * 250000 %}{% set v = [s] * 10000 %}"),
    ("equal long texts", "{% set v = ['a' * 200000 ~ 'b', 'a' * 200000 ~ 'c', 'a' * 200000 ~ 'b'] * 3000 %}"),
    ("lists of one list", "{% set v = [range(20000) | list] * 10000 %}"),
    ("maps", "{% set v = [{'a': 'x' * 100000, 'b': [1, 2]}] * 10000 %}"),
    ("map", "{% set v = {'a': 'x' * 100000, 'b': [1, 2], 'c': {'d': 1}} %}"),
    ("pairs", "{% set v = [('a', 1), ('b', 2)] * 20000 %}"),
    ("shared list", "SHARE[x, x]"),
    ("shared map", "SHARE{'a': x, 'b': x}"),
    ("shared tuple", "SHARE(x, x)"),
    ("shared items", "SHARE{'a': x, 'b': x}.items()"),
    ("chained list", "SHARE x | chain(x)"),
    ("chained map", "SHARE{'a': 1} | chain({'b': x, 'c': x})"),
    ("zipped list", "SHARE x | zip(x) | list"),
    ("reversed list", "SHARE(x | reverse) | chain(x | reverse)"),
    ("added list", "SHARE x + x"),
    ("batched list", "SHARE[x, x] | batch(1)"),
    ("nested", "{% set x = [1] %}NEST{% set v = x %}"),
];

/// What is done with `v`; `w` is a second value of the same making.
const EXPRESSIONS: &[&str] = &[
    // Filters.
    "v | abs",
    "v | attr('a')",
    "v | attr(v)",
    "v | batch(2) | list",
    "v | batch(1000000000, 0)",
    "v | batch(2, v)",
    "v | bool",
    "v | capitalize",
    "v | chain(v) | list",
    "v | chain(v, v, v) | length",
    "v | count",
    "v | d(v)",
    "v | default(v, true)",
    "v | dictsort",
    "v | dictsort(by='value')",
    "v | e",
    "v | escape | e",
    "v | first",
    "v | float",
    "v | format(v, v)",
    "'%s%s%s%s' | format(v, v, v, v)",
    "v | groupby('a')",
    "v | groupby(0) | list",
    "v | indent",
    "v | indent(100000, true, true)",
    "v | indent(v)",
    "v | int",
    "v | items | list",
    "v | join",
    "v | join(v)",
    "v | join(attribute='a')",
    "v | last",
    "v | length",
    "v | lines",
    "v | list",
    "v | lower",
    "v | map('upper') | list",
    "v | map('list') | list",
    "v | map(attribute='a') | list",
    "v | map('int')",
    "v | map('length') | list",
    "v | map('e') | map('e') | list",
    "v | map('map', 'upper') | list",
    "v | map('replace', 'a', 'bbbb') | list",
    "v | map('tojson') | join",
    "v | map(attribute=v)",
    "v | map(v)",
    "v | map('sort')",
    "v | max",
    "v | min",
    "v | pprint",
    "v | reject('eq', v) | list",
    "v | rejectattr('a', 'eq', w) | list",
    "v | replace('a', 'aa')",
    "v | replace('', v)",
    "v | replace(v, v)",
    "v | reverse | list",
    "v | round(3)",
    "v | safe",
    "v | select('eq', v) | list",
    "v | select('lower') | list",
    "v | select('in', v) | list",
    "v | select('startingwith', v)",
    "v | selectattr('a') | list",
    "v | select(v)",
    "v | reject(v)",
    "v | selectattr(v)",
    "v | rejectattr('a', v)",
    "v | sum(attribute=v)",
    "v | sum(v)",
    "v | join(attribute=v)",
    "v | groupby(v)",
    "v is divisibleby(v)",
    "v | selectattr('a', 'endingwith', 'x') | list",
    "v | slice(3) | list",
    "v | slice(1000000000)",
    "v | slice(3, v) | list",
    "v | sort",
    "v | sort(attribute='a')",
    "v | sort(reverse=true, case_sensitive=true)",
    "v | split",
    "v | split('a')",
    "v | split(v)",
    "v | string",
    "v | sum",
    "v | sum(start=[])",
    "v | sum(attribute='a', start='')",
    "v | title",
    "v | tojson",
    "v | tojson(indent='x' * 200000)",
    "v | tojson(indent=64, sort_keys=true)",
    "v | tojson(separators=(v, v))",
    "v | trim",
    "v | trim(v)",
    "v | unique | list",
    "v | unique(attribute='a') | list",
    "v | upper",
    "v | zip(v) | list",
    "v | zip(v, v, v) | map('list') | list",
    // Tests.
    "v is boolean",
    "v is defined",
    "v is divisibleby(3)",
    "v is endingwith(w)",
    "v is eq(w)",
    "v is equalto(v)",
    "v is escaped",
    "v is even",
    "v is false",
    "v is filter",
    "v is float",
    "v is ge(w)",
    "v is in(v)",
    "w is in([v, v])",
    "v is iterable",
    "v is lower",
    "v is mapping",
    "v is ne(w)",
    "v is none",
    "v is number",
    "v is odd",
    "v is sameas(w)",
    "v is sequence",
    "v is startingwith(w)",
    "v is string",
    "v is test",
    "v is true",
    "v is undefined",
    "v is upper",
    // Operators.
    "v == w",
    "v != w",
    "v < w",
    "v <= w",
    "v > w",
    "v >= w",
    "v == w == v",
    "v < w < v",
    "v in w",
    "v in [w, w]",
    "w not in [v]",
    "v in w in v",
    "v + w",
    "v * 1000",
    "v * 1000000000",
    "v ~ w",
    "v ~ v ~ v ~ v",
    "v % w",
    "'%s' % v",
    "v ** 7",
    "v / 3",
    "v // 3",
    "v - 1",
    "-v",
    "not v",
    "v and w",
    "v[0]",
    "v[-1]",
    "v[v]",
    "v['a']",
    "v.a",
    "v[1:]",
    "v[::-1]",
    "v[:100]",
    "v[-1:]",
    "{v: 1}",
    "{(v, v): 1}",
    "{'a': v}",
    "{'a': 1}[v]",
    "[v, v, v]",
    "(v, v)",
    "v if v else w",
    // Methods.
    "v.upper()",
    "v.lower()",
    "v.title()",
    "v.capitalize()",
    "v.casefold()",
    "v.swapcase()",
    "v.strip()",
    "v.strip(v)",
    "v.lstrip(v)",
    "v.rstrip('a' * 200000)",
    "v.split()",
    "v.split('a')",
    "v.split(v)",
    "v.rsplit(' ', 3)",
    "v.splitlines()",
    "v.splitlines(true)",
    "v.replace('a', 'bb')",
    "v.replace('', v)",
    "v.join(v)",
    "v.join([v, v, v])",
    "''.join(v)",
    "v.format(v, v)",
    "'{0}{0}{0}{0}'.format(v)",
    "'{:>999999999}'.format(v)",
    "v.removeprefix(v)",
    "v.removesuffix('a')",
    "v.partition('a')",
    "v.rpartition(v)",
    "v.index('b')",
    "v.index(v)",
    "v.count('a')",
    "v.count('')",
    "v.count(w)",
    "v.find('b')",
    "v.rfind('b')",
    "v.find(v)",
    "v.startswith(w)",
    "v.startswith((v, w))",
    "v.endswith([v, v])",
    "v.ljust(999999999)",
    "v.rjust(300000)",
    "v.center(300000, 'ß')",
    "v.zfill(10000000)",
    "v.isdigit()",
    "v.isalpha()",
    "v.islower()",
    "v.isupper()",
    "v.isspace()",
    "v.items() | list",
    "v.keys() | list",
    "v.values() | list",
    "v.get(v)",
    "v.get('a', v)",
    "v.items() == w.items()",
    // Functions and calls.
    "range(v)",
    "dict(v)",
    "dict(v, a=v)",
    "namespace(a=v).a",
    "namespace(v)",
    "joiner(v)()",
    "cycler(v, v).next()",
    "m(v)",
    "m(*[v, v])",
    "m(*v)",
    "m(**v)",
    "raise_exception(v)",
    "strftime_now(v)",
    "namespace(a=v) == namespace(a=w)",
];

/// How often an expression is evaluated.
const FRAMES: &[&str] = &[
    "{% set r = EXPR %}",
    "{% for i in range(9999) %}{% set r = EXPR %}{% endfor %}",
    "{{ EXPR }}",
    "{% for a, b in [(1, 2)] * 999 %}{% if EXPR %}{% endif %}{% endfor %}",
    "{% for x in EXPR recursive %}{{ loop.changed(x) }}{% if loop.depth < 3 %}{{ loop(v) }}{% endif %}{% endfor %}",
];

/// The text that makes a value `v`, and a second one `w`.
fn making(value: &str) -> String {
    let v = match value.strip_prefix("SHARE") {
        Some(part) => {
            format!("{{% set x = [0, 1] %}}{}{{% set v = x %}}", format!("{{% set x = {part} %}}").repeat(45))
        }
        None => value.replace("NEST", &"{% set x = [x] %}".repeat(90)),
    };
    let w = v.replace("set v", "set w");
    format!("{{% macro m(a) %}}{{{{ a is string }}}}{{% endmacro %}}{v}{w}")
}

/// What this process has computed, to 10 ms, so that other processes do not count; where the system does not say, the
/// time.
fn cpu() -> Duration {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    let ticks = || {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
    };
    ticks().map_or_else(|| BEGIN.elapsed(), |ticks| Duration::from_millis(10 * ticks))
}

/// Renders; what that took of the processor, and the most memory that lived meanwhile.
fn chat(source: &str, limits: Limits) -> (Result<String, Error>, Duration, usize) {
    // One at a time: the allocator counts for all threads.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock();
    let messages = Message::to_json(&[Message::new("user", "hi")]);
    let (begin, before) = (cpu(), LIVE.load(Relaxed));
    PEAK.store(before, Relaxed);
    let done = ChatTemplate::with_limits(source, "", "", limits).and_then(|t| t.render(&Chat::new(&messages)));
    (done, cpu().saturating_sub(begin), PEAK.load(Relaxed).saturating_sub(before))
}

/// Every fifth of the templates, in about ten seconds: all operations, each on some values. `MOEBIUS_WIDE` runs them
/// all, in about a minute.
#[test]
fn operations_on_values_stay_within_the_limits() {
    operations(if std::env::var_os("MOEBIUS_WIDE").is_some() { 1 } else { 5 });
}

/// Each expression on each value, alone and in one of the other frames by turns; one in `step` of all that.
fn operations(step: usize) {
    let (mut n, mut slow, mut wrong) = (0, Vec::new(), Vec::new());
    let frames = FRAMES.len() - 1;
    let all = VALUES.iter().enumerate().flat_map(|(i, value)| {
        EXPRESSIONS.iter().enumerate().flat_map(move |(j, expression)| {
            [0, 1 + (i + j) % frames]
                .into_iter()
                .enumerate()
                .map(move |(k, frame)| (i + j + 3 * k, value, expression, frame))
        })
    });
    for (_, (name, value), expression, frame) in all.filter(|(place, ..)| place % step == 0) {
        n += 1;
        let source = format!("{}{}", making(value), FRAMES[frame].replace("EXPR", expression));
        let (done, took, live) = chat(&source, LIMITS);
        let is_lost = matches!(done, Err(Error::Thread { .. }));
        if is_lost || live > MAX_LIVE || took > LIMITS.time + Duration::from_millis(700) {
            wrong.push(format!("{name}: {expression} in frame {frame}: {took:?}, {live} bytes: {done:.200?}"));
        }
        slow.push((took, live, format!("{name}: {expression} in frame {frame}: {:.120?}", done.err())));
    }
    slow.sort();
    slow.iter().rev().take(12).for_each(|s| println!("{s:?}"));
    slow.sort_by_key(|s| s.1);
    slow.iter().rev().take(5).for_each(|s| println!("{s:?}"));
    println!("{n} templates");
    assert!(wrong.is_empty(), "{} of {n}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn found_templates_stay_within_the_usual_limits() {
    let doubled = |setup: &str, step: &str, end: &str| format!("{setup}{}{end}", step.repeat(45));
    let long = "{% set s = 'a' * 16000000 %}";
    let table = [
        format!("{long}{{{{ ([s] * 1000) | map('upper') | list | length }}}}"),
        format!("{long}{{{{ ([s] * 100000) | unique | list | length }}}}"),
        "{{ ([range(100000)] * 100000) | map('list') | list | length }}".into(),
        "{% set s = 'a' * 15000000 ~ 'b' %}{% set t = 'a' * 15000000 ~ 'c' %}{{ s in ([t] * 100000) }}".into(),
        format!(
            "{long}{{% set t = 'a' * 16000000 %}}{{% for i in range(100000) %}}{{% set u = s == t %}}{{% endfor %}}"
        ),
        "{% set s = 'a' * 7000000 %}{{ s.strip('b' * 7000000) | length }}{{ s | trim('c' * 7000000) | length }}".into(),
        doubled("{% set x = [0] * 100000 %}", "{% set x = x | chain(x) %}", "{{ x | list | length }}"),
        doubled("{% set x = [0, 1] %}", "{% set x = [x, x] %}", "{{ {x: 1} | length }}"),
        doubled(
            "{% set x = [0, 1] %}",
            "{% set x = [x, x] %}",
            "{% for i in range(9) %}{{ loop.changed(x) }}{% endfor %}",
        ),
        doubled("{% set x = [0, 1] %}", "{% set x = [x, x] %}", "{{ x | upper }}"),
        // A name is hashed each time it is looked up.
        format!("{{% for i in range(100000) %}}{{{{ i.{} }}}}{{% endfor %}}", "a".repeat(900_000)),
    ];
    for source in &table {
        let (done, took, live) = chat(source, Limits::default());
        let short: String = source.chars().take(80).collect();
        println!("{took:?} {} MB: {short}: {:.120?}", live >> 20, done);
        assert!(
            matches!(done, Err(Error::Limit { .. } | Error::Failed { .. } | Error::Syntax { .. }))
                || took.as_secs() < 1
        );
        assert!(took < Duration::from_secs(5) && live < 600 << 20, "{took:?}, {live} bytes: {short}");
    }
}

/// The templates of a test of the release binary from outside, where they are at hand.
#[test]
fn fixtures_stay_within_the_usual_limits() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures/hostile");
    let Ok(files) = std::fs::read_dir(&folder) else {
        println!("skipped: no fixtures in {}", folder.display());
        return;
    };
    for file in files.map(|f| f.unwrap().path()).filter(|f| f.extension().is_some_and(|e| e == "jinja")) {
        let (done, took, live) = chat(&std::fs::read_to_string(&file).unwrap(), Limits::default());
        println!("{took:?} {} MB: {}: {done:.120?}", live >> 20, file.display());
        assert!(took < Duration::from_secs(5) && live < 600 << 20, "{took:?}, {live} bytes: {}", file.display());
    }
}

/// A namespace that holds itself, or a loop that holds it, would never be freed.
#[test]
fn nothing_outlives_its_render() {
    let table = [
        "{% set n = namespace() %}{% set n.a = ['x' * 99999, n] %}",
        "{% set n = namespace() %}{% for i in [1] %}{% set n.l = loop %}{{ loop.changed(n, 'x' * 99999) }}{% endfor %}",
        "{% set n = namespace() %}{% set n.a = {'k': [n]} %}",
    ];
    for source in table {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let messages = Message::to_json(&[]);
        assert!(template.render(&Chat::new(&messages)).is_err(), "{source}");
    }
}
