//! The printed form of a plan: one line per op (one more for each further part of a linear), with layers that repeat an
//! earlier one folded. Stable, so that snapshots can be reviewed.

use std::fmt;
use std::ops::Range;

use super::{
    Buf, Cache, DeltaHeads, DeltaRule, Elem, Gate, GateFactor, Gelu, GroupScore, Growth, InputMode, Op, Plan,
    RopePairing, Router, Rows, Score, Sharing, Weight,
};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { arch, n_vocab, d_model, n_ctx_train, ops, bufs, weights, .. } = self;
        writeln!(f, "{arch}: n_vocab {n_vocab}, d_model {d_model}, n_ctx_train {n_ctx_train}")?;
        let n_ops = ops.len() + self.draft.as_ref().map_or(0, |draft| draft.ops.len());
        writeln!(f, "{n_ops} ops, {} buffers, {} weights", bufs.len(), weights.len())?;
        let (long, beyond) = match &self.long_ropes {
            Some(long) => (&long.ropes[..], Some(long.n_ctx)),
            None => (&[][..], None),
        };
        let own = self.ropes.iter().enumerate().map(|rope| (rope, None));
        for ((i, rope), beyond) in own.chain(long.iter().enumerate().map(|rope| (rope, beyond))) {
            let pairing = match rope.pairing {
                RopePairing::Half => "half",
                RopePairing::Interleaved => "interleaved",
            };
            let (n, first, last) = (rope.inv_freq.len(), rope.inv_freq.first(), rope.inv_freq.last());
            let (first, last) = (first.copied().unwrap_or_default(), last.copied().unwrap_or_default());
            write!(f, "rope {i}: {pairing}, {n} pairs, inv_freq {first:.6e} .. {last:.6e}, factor {}", rope.factor)?;
            if let Some(Growth { beta, step, offset }) = rope.growth {
                write!(f, " · (1 + {beta} · ln(1 + ⌊(pos + {offset}) / {step}⌋))")?;
            }
            if !rope.axes.is_empty() {
                let axes: String = rope.axes.iter().map(u8::to_string).collect();
                write!(f, ", axes {axes}")?;
            }
            if let Some(n_ctx) = beyond {
                write!(f, ", in contexts beyond {n_ctx}")?;
            }
            writeln!(f)?;
        }
        for (first, last, cache) in runs(&self.caches) {
            let (n_kv, d_k, d_v) = (cache.n_kv, cache.d_k, cache.d_v);
            let v = if cache.v_in_k { format!("the first {d_v} of k") } else { d_v.to_string() };
            let window = cache.window.map_or(String::new(), |window| format!(", keeps {window}"));
            writeln!(f, "cache {}: {n_kv} heads, k {d_k}, v {v}{window}", span(first, last))?;
        }
        for (i, state) in self.states.iter().enumerate() {
            if !self.states[..i].contains(state) {
                let n = self.states.iter().filter(|s| *s == state).count();
                writeln!(f, "state {}: {n} of {} numbers", state.what, state.n)?;
            }
        }
        let sections = self.sections();
        let mut texts: Vec<(u32, String)> = Vec::new(); // layers printed in full, with names relative to the layer
        let mut folded: Option<(u32, u32, u32)> = None; // first, last, and the layer they are as
        for (layer, ops) in sections {
            let Some(layer) = layer else {
                unfold(f, &mut folded)?;
                writeln!(f, "{}", self.text(ops, None).trim_end())?;
                continue;
            };
            let text = self.text(ops.clone(), Some(layer));
            match (texts.iter().find(|(_, t)| *t == text), &mut folded) {
                (Some(&(same, _)), Some((_, last, as_))) if *as_ == same => *last = layer,
                (Some(&(same, _)), _) => {
                    unfold(f, &mut folded)?;
                    folded = Some((layer, layer, same));
                }
                (None, _) => {
                    unfold(f, &mut folded)?;
                    texts.push((layer, text));
                    writeln!(f, "layer {layer}:")?;
                    self.text(ops, None).lines().try_for_each(|line| writeln!(f, "  {line}"))?;
                }
            }
        }
        unfold(f, &mut folded)?;
        let Some(draft) = &self.draft else { return Ok(()) };
        let printer = Printer { plan: self, relative_to: None, first_cache: 0 };
        writeln!(f, "draft head, {} from {}:", printer.decl(draft.input), printer.name(draft.source))?;
        let text: String = draft.ops.iter().map(|op| printer.op(op)).collect();
        text.lines().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

fn unfold(f: &mut fmt::Formatter<'_>, folded: &mut Option<(u32, u32, u32)>) -> fmt::Result {
    match folded.take() {
        Some((first, last, same)) if first == last => writeln!(f, "layer {first} as layer {same}"),
        Some((first, last, same)) => writeln!(f, "layers {first} to {last} as layer {same}"),
        None => Ok(()),
    }
}

fn span(first: usize, last: usize) -> String {
    if first == last { first.to_string() } else { format!("{first} to {last}") }
}

/// Runs of equal values: first and last index, and the value.
fn runs<T: PartialEq + Copy>(values: &[T]) -> Vec<(usize, usize, T)> {
    let mut out: Vec<(usize, usize, T)> = Vec::new();
    for (i, &value) in values.iter().enumerate() {
        match out.last_mut() {
            Some((_, last, v)) if *v == value => *last = i,
            _ => out.push((i, i, value)),
        }
    }
    out
}

impl Plan {
    /// Runs of ops of one layer.
    fn sections(&self) -> Vec<(Option<u32>, Range<usize>)> {
        runs(&self.layers).into_iter().map(|(first, last, layer)| (layer, first..last + 1)).collect()
    }

    fn text(&self, ops: Range<usize>, relative_to: Option<u32>) -> String {
        let caches = self.ops[ops.clone()].iter().filter_map(|op| match op {
            Op::KvAppend { cache, .. } | Op::Choose { cache, .. } | Op::Attention { cache, .. } => Some(cache.0),
            _ => None,
        });
        let printer = Printer { plan: self, relative_to, first_cache: caches.min().unwrap_or(0) };
        self.ops[ops].iter().map(|op| printer.op(op)).collect()
    }
}

/// Prints ops, with layer numbers absolute, or relative to a layer to compare layers.
struct Printer<'a> {
    plan: &'a Plan,
    relative_to: Option<u32>,
    /// Number of the first cache, for caches printed relative to a layer: not every layer has one.
    first_cache: u32,
}

impl Printer<'_> {
    fn op(&self, op: &Op) -> String {
        let name = op.name();
        let line = |out: &str, rest: String| format!("{name:<13}{out} = {rest}\n");
        let update = |x: &str, rest: String| format!("{name:<13}{x} {rest}\n");
        match *op {
            Op::Embed { table, scale, out } => line(&self.decl(out), format!("{}[id]{}", self.w(table), times(scale))),
            Op::EmbedPlace { table, axis, out } => line(&self.decl(out), format!("{}[place {axis}]", self.w(table))),
            Op::Linear { x, ref parts } => {
                let mut text = String::new();
                for (i, part) in parts.iter().enumerate() {
                    let bias = part.bias.map_or(String::new(), |b| format!(" + {}", self.w(b)));
                    let name = if i == 0 { name } else { "" };
                    let (out, x, w) = (self.decl(part.out), self.name(x), self.w(part.w));
                    text += &format!("{name:<13}{out} = {x} · {w}{bias}\n");
                }
                text
            }
            Op::GatedLinear { x, gate, up, act, out } => {
                let (x, gate, up) = (self.name(x), self.w(gate), self.w(up));
                line(&self.decl(out), format!("{}({x} · {gate}) ⊙ ({x} · {up})", gate_name(act)))
            }
            Op::RmsNorm { x, residual, w, eps, out } => {
                let x = self.name(x);
                let x = residual.map_or(x.clone(), |r| format!("{x} += {}", self.name(r)));
                line(&self.decl(out), format!("norm({x}) ⊙ {}, eps {eps:e}", self.w(w)))
            }
            Op::Center { x, out } => line(&self.decl(out), format!("{0} - mean({0})", self.name(x))),
            Op::HeadNorm { x, w, eps, n_head, d_head } => {
                let w = w.map_or(String::new(), |w| format!(" ⊙ {}", self.w(w)));
                update(&self.name(x), format!("= norm of {n_head} heads of {d_head}{w}, eps {eps:e}"))
            }
            Op::Rope { x, rope, n_head, d_head } => {
                update(&self.name(x), format!("= rope {} of {n_head} heads of {d_head}", rope.0))
            }
            Op::SplitHeads { x, n_head, ref parts } => {
                let parts: Vec<String> = parts.iter().map(|&(_, part)| self.decl(part)).collect();
                line(&parts.join(", "), format!("parts of {n_head} heads of {}", self.name(x)))
            }
            Op::JoinHeads { ref parts, n_head, out } => {
                let parts: Vec<String> = parts.iter().map(|&(_, part)| self.name(part)).collect();
                line(&self.decl(out), format!("{n_head} heads of {}", parts.join(" ‖ ")))
            }
            Op::HeadLinear { x, w, transposed, out } => {
                let transposed = if transposed { "ᵀ" } else { "" };
                line(&self.decl(out), format!("{} · {}{transposed} by head", self.name(x), self.w(w)))
            }
            Op::GatedAct { gate, up, act, out } => {
                line(&self.decl(out), format!("{}({}) ⊙ {}", gate_name(act), self.name(gate), self.name(up)))
            }
            Op::Add { x, y } => update(&self.name(x), format!("+= {}", self.name(y))),
            Op::KvAppend { cache, k, v } => {
                let v = v.map_or(String::new(), |v| format!(", {}", self.name(v)));
                update(&self.cache_name(cache), format!("← {}{v}", self.name(k)))
            }
            Op::Choose { cache, q, weights, out } => {
                let (q, weights, cache) = (self.name(q), self.name(weights), self.cache_name(cache));
                line(&self.decl(out), format!("best positions of {cache} for {q}, heads by {weights}"))
            }
            Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out } => {
                let mut rest =
                    format!("{} over {}, {n_head} heads, scale {scale}", self.name(q), self.cache_name(cache));
                let kind = if chunked { "chunk" } else { "window" };
                let ways = if self.plan.whole { " both ways" } else { "" };
                rest += &window.map_or(String::new(), |n| format!(", {kind} {n}{ways}"));
                rest += &softcap.map_or(String::new(), |cap| format!(", softcap {cap}"));
                rest += &chosen.map_or(String::new(), |chosen| format!(", at {}", self.name(chosen)));
                rest += &sinks.map_or(String::new(), |w| format!(", sinks {}", self.w(w)));
                line(&self.decl(out), rest)
            }
            Op::Route { logits, router, n_used, ids, weights } => {
                let outs = format!("{}, {}", self.decl(ids), self.decl(weights));
                line(&outs, self.router(router, logits, n_used))
            }
            Op::Experts { x, ids, gate, up, down, biases, act, hidden, out } => {
                let (x, ids, hidden) = (self.name(x), self.name(ids), self.decl(hidden));
                let biased = |w, bias: Option<Weight>| {
                    self.w(w) + &bias.map_or(String::new(), |bias| format!(" + {}", self.w(bias)))
                };
                let gate = biased(gate, biases.map(|b| b.gate));
                let up = biased(up, biases.map(|b| b.up));
                let down = biased(down, biases.map(|b| b.down));
                let act = gate_name(act);
                line(
                    &self.decl(out),
                    format!("({act}({x} · {gate}) ⊙ ({x} · {up})) · {down}, by {ids}, scratch {hidden}"),
                )
            }
            Op::Combine { x, add, y, weights, norm } => {
                let sum = format!("{} {} · {}", if add { "+=" } else { "=" }, self.name(weights), self.name(y));
                let norm = norm.map_or(String::new(), |n| {
                    format!("; {} = norm ⊙ {}, eps {:e}", self.decl(n.out), self.w(n.w), n.eps)
                });
                let x = if add { self.name(x) } else { self.decl(x) };
                update(&x, sum + &norm)
            }
            Op::Select { x, out } => {
                let merged = self.plan.buf(out).width / self.plan.buf(x).width;
                let merged = if merged == 1 { String::new() } else { format!(", {merged} rows side by side") };
                line(&self.decl(out), format!("{}[rows]{merged}", self.name(x)))
            }
            Op::Scale { x, scale } => update(&self.name(x), format!("*= {scale}")),
            Op::ScaleBy { x, w } => update(&self.name(x), format!("*= {}", self.w(w))),
            Op::CausalConv { x, w, bias, silu, out, .. } => {
                let bias = bias.map_or(String::new(), |b| format!(" + {}", self.w(b)));
                let sum = format!("{} * {}{bias}", self.name(x), self.w(w));
                line(&self.decl(out), if silu { format!("silu({sum})") } else { sum })
            }
            Op::DeltaNet { q, k, v, g, beta, skip, heads, out, .. } => {
                let DeltaHeads { n_k_head, n_v_head, d_k, d_v, sharing, rule } = heads;
                let sharing = match sharing {
                    Sharing::Grouped => "grouped",
                    Sharing::Tiled => "tiled",
                };
                let [q, k, v, g, beta] = [q, k, v, g, beta].map(|buf| self.name(buf));
                let heads = format!("{n_v_head} heads of {d_k} by {d_v} on {n_k_head}, {sharing}");
                let rule = match rule {
                    DeltaRule::Delta => "delta rule",
                    DeltaRule::Sum => "decaying sum",
                };
                let skip = skip.map_or(String::new(), |w| format!(" + {} ⊙ {v}", self.w(w)));
                line(&self.decl(out), format!("{rule} of {q}, {k}, {v}, decay {g}, rate {beta}, {heads}{skip}"))
            }
            Op::GateBy { x, gate, factor } => {
                let factor = match factor {
                    GateFactor::Sigmoid => "σ",
                    GateFactor::Softplus => "softplus",
                    GateFactor::Plain => "",
                };
                update(&self.name(x), format!("⊙= {factor}({})", self.name(gate)))
            }
            Op::DecayBeta { a, b, a_log, dt_bias, bound, g_out, beta_out } => {
                let outs = format!("{}, {}", self.decl(g_out), self.decl(beta_out));
                let (a, a_log) = (format!("({} + {})", self.name(a), self.w(dt_bias)), self.w(a_log));
                let decay = match bound {
                    Some(bound) => format!("{bound} · σ({a_log} ⊙ {a})"),
                    None => format!("{a_log} ⊙ softplus{a}"),
                };
                let rate = b.map_or("the same softplus".into(), |b| format!("σ({})", self.name(b)));
                line(&outs, format!("exp({decay}), {rate}"))
            }
            Op::GatedNorm { x, gate, w, gate_first, eps, n_head, d_head } => {
                let (w, gate) = (self.w(w), self.name(gate));
                let text = match gate_first {
                    false => format!("norm of {n_head} heads of {d_head} ⊙ {w} ⊙ silu({gate})"),
                    true => format!("norm of {n_head} heads of {d_head} after ⊙ silu({gate}) ⊙ {w}"),
                };
                update(&self.name(x), format!("= {text}, eps {eps:e}"))
            }
            Op::Input { x, first, mode } => {
                let given = format!("given[{first}..{}]", first + self.plan.buf(x).width);
                match mode {
                    InputMode::All => line(&self.decl(x), given),
                    InputMode::Replace => update(&self.name(x), format!("= {given} where given")),
                    InputMode::Add => update(&self.name(x), format!("+= {given} where given")),
                }
            }
            Op::AddBias { x, w } => update(&self.name(x), format!("+= {}", self.w(w))),
            Op::Clamp { x, low, high } => {
                update(&self.name(x), format!("= {} in {} to {}", self.name(x), self.w(low), self.w(high)))
            }
            Op::Constant { ref values, out } => {
                let runs = runs(values).into_iter().map(|(first, last, x)| match last - first {
                    0 => format!("{x}"),
                    n => format!("{x} {} times", n + 1),
                });
                line(&self.decl(out), runs.collect::<Vec<_>>().join(", "))
            }
            Op::Gelu { x, form } => {
                let form = match form {
                    Gelu::Erf => "gelu",
                    Gelu::Tanh => "gelu_tanh",
                };
                update(&self.name(x), format!("= {form}({})", self.name(x)))
            }
            Op::Softcap { x, cap } => update(&self.name(x), format!("= softcap {cap}")),
            Op::AllReduce { x } => update(&self.name(x), "= its sum over all parts".into()),
        }
    }

    fn router(&self, router: Router, logits: Buf, n_used: usize) -> String {
        let (x, n_expert) = (self.name(logits), self.plan.buf(logits).width);
        let score = match router.score {
            Score::Softmax => format!("softmax({x})"),
            Score::Sigmoid => format!("σ({x})"),
            Score::Raw | Score::Sparse { .. } => x,
        };
        let mut text = format!("{score} best {n_used} of {n_expert}");
        text += &router.bias.map_or(String::new(), |w| format!(" by + {}", self.w(w)));
        if let Some(groups) = router.groups {
            let by = match groups.score {
                GroupScore::Max => "best",
                GroupScore::TopTwo => "two best",
            };
            text += &format!(" in {} of {} groups by their {by}", groups.n_used, groups.n_group);
        }
        text += &match router.score {
            Score::Raw => ", softmax".into(),
            Score::Sparse { margin } => format!(", softmax of what is within {margin}"),
            Score::Softmax | Score::Sigmoid => String::new(),
        };
        text += if router.renormalise.is_some() { ", renormalised" } else { "" };
        text += &times(router.scale);
        text += &router.expert_scale.map_or(String::new(), |w| format!(" · {}", self.w(w)));
        text += &router.local.map_or(String::new(), |l| format!(", here {} to {}", l.first, l.first + l.n - 1));
        text
    }

    /// Returns a buffer at its write: name and shape.
    fn decl(&self, buf: Buf) -> String {
        let decl = self.plan.buf(buf);
        let rows = match decl.rows {
            Rows::Tokens => "T".into(),
            Rows::Slots(n) => format!("T·{n}"),
            Rows::Outputs => "R".into(),
            Rows::OutputSlots(n) => format!("R·{n}"),
        };
        let elem = match decl.elem {
            Elem::F32 => "",
            Elem::F16 => " f16",
            Elem::BF16 => " bf16",
            Elem::U32 => " u32",
        };
        format!("{}{elem}[{rows}, {}]", self.name(buf), decl.width)
    }

    fn name(&self, buf: Buf) -> String {
        let name = &self.plan.buf(buf).name;
        match name.rsplit_once('.').and_then(|(stem, n)| Some((stem, n.parse().ok()?))) {
            Some((stem, layer)) => format!("{stem}.{}", self.layer(layer)),
            None => name.clone(),
        }
    }

    /// Returns a weight: name, type and shape.
    fn w(&self, w: Weight) -> String {
        let decl = self.plan.weight(w);
        let numbered = decl.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let name = match numbered.and_then(|(n, rest)| Some((n.parse().ok()?, rest))) {
            Some((layer, rest)) => format!("blk.{}.{rest}", self.layer(layer)),
            None => decl.name.clone(),
        };
        format!("{name} {}{:?}", decl.dtype, decl.shape)
    }

    fn cache_name(&self, cache: Cache) -> String {
        match self.relative_to {
            Some(_) => format!("cache.{:+}", cache.0 - self.first_cache),
            None => format!("cache.{}", cache.0),
        }
    }

    fn layer(&self, layer: u32) -> String {
        match self.relative_to {
            Some(base) => format!("{:+}", i64::from(layer) - i64::from(base)),
            None => layer.to_string(),
        }
    }
}

fn gate_name(gate: Gate) -> String {
    match gate {
        Gate::Silu => "silu".into(),
        Gate::GeluTanh => "gelu_tanh".into(),
        Gate::Relu => "relu".into(),
        Gate::ClampedSwiglu { alpha, limit } => format!("clamped_swiglu[{alpha}, {limit}]"),
        Gate::ClampedSilu { limit } => format!("clamped_silu[{limit}]"),
    }
}

fn times(scale: f32) -> String {
    if scale == 1.0 { String::new() } else { format!(" · {scale}") }
}
