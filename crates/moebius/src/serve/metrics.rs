//! Numbers for Prometheus: counters and histograms without locks, written as text on request. Our names, and the three
//! of vLLM that autoscalers read.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engine::scheduler::Stats;

use super::worker::usage_share;

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

    fn write(&self, out: &mut String, name: &str, about: &str) {
        head(out, name, "histogram", about);
        let mut n = 0;
        for (bucket, bound) in
            self.buckets.iter().zip(BOUNDS.map(|b| b.to_string()).iter().map(String::as_str).chain(["+Inf"]))
        {
            n += bucket.load(Ordering::Relaxed);
            line(out, format_args!("{name}_bucket{{le=\"{bound}\"}} {n}"));
        }
        line(out, format_args!("{name}_sum {}", self.sum_us.load(Ordering::Relaxed) as f64 / 1e6));
        line(out, format_args!("{name}_count {n}"));
    }
}

/// Everything that is counted.
#[derive(Debug, Default)]
pub struct Metrics {
    pub prompt_tokens: Counter,
    pub cached_tokens: Counter,
    pub generated_tokens: Counter,
    pub cancelled: Counter,
    pub failed: Counter,
    pub refused: Counter,
    pub step_seconds: Histogram,
    pub first_token_seconds: Histogram,
    pub between_tokens_seconds: Histogram,
    pub request_seconds: Histogram,
    /// Answers by route and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
}

impl Metrics {
    /// Counts an answer of a route.
    pub fn answered(&self, route: &'static str, status: u16, time: Duration) {
        let mut requests = self.requests.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *requests.entry((route, status)).or_default() += 1;
        self.request_seconds.observe(time);
    }

    /// The text that Prometheus reads, of these models.
    pub fn text(&self, models: &[(&str, Stats)]) -> String {
        let mut stats = Stats::default();
        for (_, of) in models {
            stats.steps += of.steps;
            stats.tokens += of.tokens;
            stats.preemptions += of.preemptions;
            stats.running += of.running;
            stats.waiting += of.waiting;
            if let Some(of) = of.streamed {
                *stats.streamed.get_or_insert_default() += of;
            }
            stats.pages.total += of.pages.total;
            stats.pages.free += of.pages.free;
            stats.pages.cached += of.pages.cached;
            stats.pages.used += of.pages.used;
        }
        let mut out = String::with_capacity(8192);
        head(&mut out, "moebius_requests_total", "counter", "Answers by route and status.");
        for ((route, status), n) in self.requests.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter() {
            line(&mut out, format_args!("moebius_requests_total{{route=\"{route}\",status=\"{status}\"}} {n}"));
        }
        let counters = [
            ("moebius_prompt_tokens_total", self.prompt_tokens.get(), "Tokens of prompts."),
            ("moebius_prompt_tokens_cached_total", self.cached_tokens.get(), "Those that the prefix cache had."),
            ("moebius_generated_tokens_total", self.generated_tokens.get(), "Tokens of answers."),
            ("moebius_cancelled_total", self.cancelled.get(), "Sequences whose client went away."),
            ("moebius_failed_total", self.failed.get(), "Sequences that ended in an error."),
            ("moebius_refused_total", self.refused.get(), "Requests that found the queue full."),
            ("moebius_steps_total", stats.steps, "Steps of the model."),
            ("moebius_computed_tokens_total", stats.tokens, "Tokens computed, in prompts and answers."),
            ("moebius_preemptions_total", stats.preemptions, "Times that a sequence gave its pages to others."),
        ];
        for (name, value, about) in counters {
            head(&mut out, name, "counter", about);
            line(&mut out, format_args!("{name} {value}"));
        }
        if let Some(streamed) = stats.streamed {
            let micros = streamed.waited.as_micros() as f64 / 1e6;
            let counters = [
                ("moebius_experts_wanted_total", streamed.wanted as f64, "Experts that steps wanted."),
                ("moebius_experts_hit_total", streamed.hits as f64, "Those that were in memory."),
                ("moebius_experts_coming_total", streamed.coming as f64, "Those that a prefetch was reading."),
                ("moebius_experts_prefetched_total", streamed.prefetched as f64, "Experts that were prefetched."),
                ("moebius_experts_read_bytes_total", streamed.bytes as f64, "Bytes of experts read from disk."),
                ("moebius_experts_waited_seconds_total", micros, "Time in which steps waited for experts."),
            ];
            for (name, value, about) in counters {
                head(&mut out, name, "counter", about);
                line(&mut out, format_args!("{name} {value}"));
            }
            head(&mut out, "moebius_expert_slabs", "gauge", "Experts that memory holds at a time.");
            line(&mut out, format_args!("moebius_expert_slabs {}", streamed.n_slabs));
        }
        let pages = stats.pages;
        head(&mut out, "moebius_kv_pages", "gauge", "Pages of the cache by state.");
        for (state, n) in [("free", pages.free), ("cached", pages.cached), ("used", pages.used)] {
            line(&mut out, format_args!("moebius_kv_pages{{state=\"{state}\"}} {n}"));
        }
        let (running, waiting, share) = (stats.running as f64, stats.waiting as f64, usage_share(pages));
        let gauges = [
            ("moebius_sequences_running", running, "Sequences that hold pages."),
            ("moebius_sequences_waiting", waiting, "Sequences that wait for pages."),
            ("moebius_kv_usage_ratio", share, "Pages in use, as a share of all."),
        ];
        for (name, value, about) in gauges {
            head(&mut out, name, "gauge", about);
            line(&mut out, format_args!("{name} {value}"));
        }
        let vllm: [(&str, fn(Stats) -> f64, &str); 3] = [
            ("vllm:num_requests_running", |stats| stats.running as f64, "As moebius_sequences_running."),
            ("vllm:num_requests_waiting", |stats| stats.waiting as f64, "As moebius_sequences_waiting."),
            ("vllm:kv_cache_usage_perc", |stats| usage_share(stats.pages), "As moebius_kv_usage_ratio; 1 is full."),
        ];
        for (name, value, about) in vllm {
            head(&mut out, name, "gauge", about);
            for (model, stats) in models {
                let label = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
                line(&mut out, format_args!("{name}{{model_name=\"{label}\"}} {}", value(*stats)));
            }
        }
        let histograms = [
            ("moebius_step_seconds", &self.step_seconds, "Time of a step."),
            ("moebius_first_token_seconds", &self.first_token_seconds, "From submission to the first token."),
            (
                "moebius_between_tokens_seconds",
                &self.between_tokens_seconds,
                "From one token of an answer to the next.",
            ),
            ("moebius_request_seconds", &self.request_seconds, "From a request's head to the start of its answer."),
        ];
        for (name, histogram, about) in histograms {
            histogram.write(&mut out, name, about);
        }
        out
    }
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
    use backend::StreamStats;

    use super::*;

    #[test]
    fn streamed_experts_are_counted_where_there_are_any() {
        let streamed = StreamStats { bytes: 5, waited: Duration::from_millis(1500), ..StreamStats::default() };
        let text = Metrics::default().text(&[("a", Stats { streamed: Some(streamed), ..Stats::default() })]);
        for expected in ["moebius_experts_read_bytes_total 5\n", "moebius_experts_waited_seconds_total 1.5\n"] {
            assert!(text.contains(expected), "{expected}{text}");
        }
        assert!(!Metrics::default().text(&[("a", Stats::default())]).contains("moebius_expert"));
    }

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.answered("/v1/models", 200, Duration::from_millis(3));
        metrics.step_seconds.observe(Duration::from_secs(1000));
        let text = metrics.text(&[("a\"b", Stats::default())]);
        for expected in [
            "moebius_requests_total{route=\"/v1/models\",status=\"200\"} 1\n",
            "vllm:kv_cache_usage_perc{model_name=\"a\\\"b\"} 0\n",
            "moebius_request_seconds_bucket{le=\"0.0025\"} 0\n",
            "moebius_request_seconds_bucket{le=\"0.005\"} 1\n",
            "moebius_step_seconds_bucket{le=\"300\"} 0\n",
            "moebius_step_seconds_bucket{le=\"+Inf\"} 1\n",
        ] {
            assert!(text.contains(expected), "{expected}{text}");
        }
        for row in text.lines().filter(|row| !row.starts_with('#')) {
            assert!(row.rsplit_once(' ').is_some_and(|(_, value)| value.parse::<f64>().is_ok()), "{row}");
        }
    }
}
