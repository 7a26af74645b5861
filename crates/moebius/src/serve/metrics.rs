//! Numbers for Prometheus: counters and histograms without locks, written as text on request. Our names, and those of
//! vLLM that autoscalers and gateways read.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use backend::{PAGE, StreamStats};
use engine::scheduler::Stats;

use super::worker::{lock, usage_share};
use crate::{machine, version};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds of the buckets, in seconds: from a fast decode step to a long answer.
const BOUNDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Durations, counted by size.
#[derive(Debug, Default)]
pub struct Histogram {
    /// One a bound, and one for what is longer than all; not cumulative.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let bucket = BOUNDS.partition_point(|&bound| bound < time.as_secs_f64());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// Writes its lines with `labels` before the bound, each of which ends in a comma.
    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let mut n = 0;
        for (bucket, bound) in
            self.buckets.iter().zip(BOUNDS.map(|b| b.to_string()).iter().map(String::as_str).chain(["+Inf"]))
        {
            n += bucket.load(Ordering::Relaxed);
            line(out, format_args!("{name}_bucket{{{labels}le=\"{bound}\"}} {n}"));
        }
        let labels = labels.strip_suffix(',').map_or(String::new(), |labels| format!("{{{labels}}}"));
        line(out, format_args!("{name}_sum{labels} {}", self.sum_us.load(Ordering::Relaxed) as f64 / 1e6));
        line(out, format_args!("{name}_count{labels} {n}"));
    }
}

/// What is counted of one model, also while it is not loaded.
#[derive(Debug, Default)]
pub struct ModelMetrics {
    pub prompt_tokens: Counter,
    pub cached_tokens: Counter,
    pub generated_tokens: Counter,
    pub cancelled: Counter,
    pub failed: Counter,
    pub step_seconds: Histogram,
    pub first_token_seconds: Histogram,
    pub between_tokens_seconds: Histogram,
}

/// Everything that is counted.
#[derive(Debug)]
pub struct Metrics {
    pub refused: Counter,
    request_seconds: Histogram,
    /// Answers by route and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    models: Mutex<BTreeMap<String, Arc<ModelMetrics>>>,
    started: Instant,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            refused: Counter::default(),
            request_seconds: Histogram::default(),
            requests: Mutex::default(),
            models: Mutex::default(),
            started: Instant::now(),
        }
    }
}

impl Metrics {
    /// Counts an answer of a route.
    pub fn answered(&self, route: &'static str, status: u16, time: Duration) {
        *lock(&self.requests).entry((route, status)).or_default() += 1;
        self.request_seconds.observe(time);
    }

    /// Returns what is counted of a model.
    pub fn model(&self, id: &str) -> Arc<ModelMetrics> {
        lock(&self.models).entry(id.into()).or_default().clone()
    }

    /// Returns the text that Prometheus reads; `loaded` are the models that are.
    pub fn text(&self, loaded: &[(&str, Stats)]) -> String {
        let mut out = String::with_capacity(16 << 10);
        let out = &mut out;
        head(out, "moebius_build_info", "gauge", "The program; the value is 1.");
        let (version, commit) = (version::NUMBER, version::COMMIT);
        line(out, format_args!("moebius_build_info{{version=\"{version}\",commit=\"{commit}\"}} 1"));
        head(out, "moebius_uptime_seconds", "gauge", "Time since the server started.");
        line(out, format_args!("moebius_uptime_seconds {}", self.started.elapsed().as_millis() as f64 / 1e3));
        if let Some(bytes) = machine::resident_memory() {
            head(out, "process_resident_memory_bytes", "gauge", "Resident memory of the process.");
            line(out, format_args!("process_resident_memory_bytes {bytes}"));
        }
        head(out, "moebius_requests_total", "counter", "Answers by route and status.");
        for ((route, status), n) in lock(&self.requests).iter() {
            line(out, format_args!("moebius_requests_total{{route=\"{route}\",status=\"{status}\"}} {n}"));
        }
        head(out, "moebius_refused_total", "counter", "Requests refused because the queue was full.");
        line(out, format_args!("moebius_refused_total {}", self.refused.get()));
        self.write_models(out);
        write_stats(out, loaded);
        let about = "From a request's head to the start of its answer.";
        head(out, "moebius_request_seconds", "histogram", about);
        self.request_seconds.write(out, "moebius_request_seconds", "");
        std::mem::take(out)
    }

    /// Writes what is counted of every model that was loaded.
    fn write_models(&self, out: &mut String) {
        let models: Vec<_> = lock(&self.models).iter().map(|(id, model)| (label(id), model.clone())).collect();
        let counters: [(&str, fn(&ModelMetrics) -> &Counter, &str); 5] = [
            (
                "moebius_prompt_tokens_total",
                |m| &m.prompt_tokens,
                "Prompt tokens, computed or found in the prefix cache.",
            ),
            ("moebius_prompt_tokens_cached_total", |m| &m.cached_tokens, "Prompt tokens found in the prefix cache."),
            ("moebius_generated_tokens_total", |m| &m.generated_tokens, "Generated tokens."),
            ("moebius_cancelled_total", |m| &m.cancelled, "Sequences cancelled because their client disconnected."),
            ("moebius_failed_total", |m| &m.failed, "Sequences that ended in an error."),
        ];
        for (name, of, about) in counters {
            head(out, name, "counter", about);
            for (label, model) in &models {
                line(out, format_args!("{name}{{model=\"{label}\"}} {}", of(model).get()));
            }
        }
        let histograms: [(&str, fn(&ModelMetrics) -> &Histogram, &str); 3] = [
            ("moebius_step_seconds", |m| &m.step_seconds, "Duration of a step."),
            ("moebius_first_token_seconds", |m| &m.first_token_seconds, "From submission to the first token."),
            (
                "moebius_between_tokens_seconds",
                |m| &m.between_tokens_seconds,
                "From one token of an answer to the next.",
            ),
        ];
        for (name, of, about) in histograms {
            head(out, name, "histogram", about);
            for (label, model) in &models {
                of(model).write(out, name, &format!("model=\"{label}\","));
            }
        }
    }
}

/// Writes what engines say of themselves.
fn write_stats(out: &mut String, loaded: &[(&str, Stats)]) {
    let loaded: Vec<(String, Stats)> = loaded.iter().map(|(id, stats)| (label(id), *stats)).collect();
    // Name, kind, label of the model, value, description.
    type Row = (&'static str, &'static str, &'static str, fn(&Stats) -> f64, &'static str);
    let rows: [Row; 11] = [
        ("moebius_steps_total", "counter", "model", |s| s.steps as f64, "Steps of the model."),
        ("moebius_computed_tokens_total", "counter", "model", |s| s.tokens as f64, "Tokens computed in all."),
        ("moebius_preemptions_total", "counter", "model", |s| s.preemptions as f64, "Preemptions for lack of pages."),
        ("moebius_drafted_tokens_total", "counter", "model", |s| s.drafted as f64, "Tokens that were drafted."),
        ("moebius_accepted_tokens_total", "counter", "model", |s| s.accepted as f64, "Drafted tokens that were right."),
        ("moebius_sequences_running", "gauge", "model", |s| s.running as f64, "Sequences that hold pages."),
        ("moebius_sequences_waiting", "gauge", "model", |s| s.waiting as f64, "Sequences that wait for pages."),
        ("moebius_kv_usage_ratio", "gauge", "model", |s| usage_share(s.pages), "Share of KV cache pages in use."),
        ("vllm:num_requests_running", "gauge", "model_name", |s| s.running as f64, "As moebius_sequences_running."),
        ("vllm:num_requests_waiting", "gauge", "model_name", |s| s.waiting as f64, "As moebius_sequences_waiting."),
        (
            "vllm:kv_cache_usage_perc",
            "gauge",
            "model_name",
            |s| usage_share(s.pages),
            "As moebius_kv_usage_ratio; 1 is full.",
        ),
    ];
    for (name, kind, key, value, about) in rows {
        head(out, name, kind, about);
        for (label, stats) in &loaded {
            line(out, format_args!("{name}{{{key}=\"{label}\"}} {}", value(stats)));
        }
    }
    head(out, "vllm:cache_config_info", "gauge", "Tokens of a KV cache page, and pages of the cache, as labels.");
    for (label, stats) in &loaded {
        let labels = format!("block_size=\"{PAGE}\",num_gpu_blocks=\"{}\"", stats.pages.total);
        line(out, format_args!("vllm:cache_config_info{{model_name=\"{label}\",{labels}}} 1"));
    }
    head(out, "moebius_kv_pages", "gauge", "KV cache pages by state.");
    for (label, Stats { pages, .. }) in &loaded {
        for (state, n) in [("free", pages.free), ("cached", pages.cached), ("used", pages.used)] {
            line(out, format_args!("moebius_kv_pages{{state=\"{state}\",model=\"{label}\"}} {n}"));
        }
    }
    let streamed: Vec<_> = loaded.iter().filter_map(|(label, stats)| Some((label, stats.streamed?))).collect();
    let rows: [(&str, &str, fn(&StreamStats) -> f64, &str); 7] = [
        ("moebius_experts_wanted_total", "counter", |s| s.wanted as f64, "Experts that steps requested."),
        ("moebius_experts_hit_total", "counter", |s| s.hits as f64, "Requested experts that were in memory."),
        (
            "moebius_experts_coming_total",
            "counter",
            |s| s.coming as f64,
            "Requested experts that a prefetch was reading.",
        ),
        ("moebius_experts_prefetched_total", "counter", |s| s.prefetched as f64, "Experts that were prefetched."),
        ("moebius_experts_read_bytes_total", "counter", |s| s.bytes as f64, "Bytes of experts read from disk."),
        (
            "moebius_experts_waited_seconds_total",
            "counter",
            |s| s.waited.as_micros() as f64 / 1e6,
            "Time that steps waited for experts.",
        ),
        ("moebius_expert_slabs", "gauge", |s| s.n_slabs as f64, "Experts that fit in memory at once."),
    ];
    for (name, kind, value, about) in rows.into_iter().filter(|_| !streamed.is_empty()) {
        head(out, name, kind, about);
        for (label, stats) in &streamed {
            line(out, format_args!("{name}{{model=\"{label}\"}} {}", value(stats)));
        }
    }
}

/// Returns a name as a label's value.
fn label(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn head(out: &mut String, name: &str, kind: &str, about: &str) {
    line(out, format_args!("# HELP {name} {about}\n# TYPE {name} {kind}"));
}

/// Writing to a string does not fail.
fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streamed_experts_are_counted_where_there_are_any() {
        let streamed = StreamStats { bytes: 5, waited: Duration::from_millis(1500), ..StreamStats::default() };
        let text = Metrics::default().text(&[("a", Stats { streamed: Some(streamed), ..Stats::default() })]);
        for expected in [
            "moebius_experts_read_bytes_total{model=\"a\"} 5\n",
            "moebius_experts_waited_seconds_total{model=\"a\"} 1.5\n",
        ] {
            assert!(text.contains(expected), "{expected}{text}");
        }
        assert!(!Metrics::default().text(&[("a", Stats::default())]).contains("moebius_expert"));
    }

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.answered("/v1/models", 200, Duration::from_millis(3));
        metrics.model("a\"b").step_seconds.observe(Duration::from_secs(1000));
        metrics.model("gone").generated_tokens.add(7);
        let text = metrics.text(&[("a\"b", Stats::default())]);
        for expected in [
            "moebius_requests_total{route=\"/v1/models\",status=\"200\"} 1\n",
            "vllm:kv_cache_usage_perc{model_name=\"a\\\"b\"} 0\n",
            "vllm:cache_config_info{model_name=\"a\\\"b\",block_size=\"32\",num_gpu_blocks=\"0\"} 1\n",
            "moebius_request_seconds_bucket{le=\"0.0025\"} 0\n",
            "moebius_request_seconds_bucket{le=\"0.005\"} 1\n",
            "moebius_step_seconds_bucket{model=\"a\\\"b\",le=\"300\"} 0\n",
            "moebius_step_seconds_bucket{model=\"a\\\"b\",le=\"+Inf\"} 1\n",
            "moebius_step_seconds_count{model=\"a\\\"b\"} 1\n",
            "moebius_generated_tokens_total{model=\"gone\"} 7\n",
            "moebius_request_seconds_count 1\n",
            &format!("moebius_build_info{{version=\"{}\",commit=", version::NUMBER),
            "\nmoebius_uptime_seconds 0",
        ] {
            assert!(text.contains(expected), "{expected}{text}");
        }
        for row in text.lines().filter(|row| !row.starts_with('#')) {
            assert!(row.rsplit_once(' ').is_some_and(|(_, value)| value.parse::<f64>().is_ok()), "{row}");
        }
    }
}
