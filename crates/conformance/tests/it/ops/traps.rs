//! The harness itself: backends that are wrong in one way, as kernels are, must not pass. They compute what the
//! reference does, but for that, and are allowed what the CPU is.

use std::collections::HashSet;
use std::sync::Arc;

use backend::reference::Reference;
use model::plan::*;
use quant::act::ActKind;

use super::case::Case;
use super::{OPS, check, is_sample};
use conformance::Sabotage;
use conformance::backends::{self, Row};

/// Applies a change to every op of a plan.
fn each(plan: &mut Plan, change: impl FnMut(&mut Op)) {
    plan.ops.iter_mut().for_each(change);
}

/// Puts zeros where a buffer's columns from `keep` on were, before op `at` reads it.
fn forget_columns(plan: &mut Plan, at: usize, old: Buf, keep: usize) {
    let decl = plan.buf(old).clone();
    let mut buf = |width| {
        plan.bufs.push(BufDecl { width, ..decl.clone() });
        Buf(plan.bufs.len() as u32 - 1)
    };
    let (first, rest, whole) = (buf(keep), buf(decl.width - keep), buf(decl.width));
    let parts = vec![(keep, first), (decl.width - keep, rest)];
    plan.ops[at].for_each_buf_mut(|buf, _| *buf = if *buf == old { whole } else { *buf });
    let ops = [
        Op::SplitHeads { x: old, n_head: 1, parts: parts.clone() },
        Op::Scale { x: rest, scale: 0.0 },
        Op::JoinHeads { parts, n_head: 1, out: whole },
    ];
    plan.layers.splice(at..at, [None; 3]);
    plan.ops.splice(at..at, ops);
}

/// Matrices of a stack found by the low byte of their index.
fn narrow_ids(plan: &mut Plan) {
    for decl in plan.weights.iter_mut().filter(|decl| decl.shape.len() == 3 && decl.shape[0] > 256) {
        let Source::Tensor(tensor) = decl.source.clone() else { continue };
        let slab = |i: usize| Slab { tensor: tensor.clone(), first_row: i % 256 * decl.shape[1] };
        decl.source = Source::Slabs((0..decl.shape[0]).map(slab).collect());
    }
}

/// What a kernel does wrong, and the ops that must show it.
fn traps() -> Vec<(&'static str, &'static [&'static str], Sabotage)> {
    let plain = || Sabotage::of(Arc::new(Reference));
    let plan = |plan| Sabotage { plan, ..plain() };
    let logits = |logits| Sabotage { logits, ..plain() };
    let batch = |batch| Sabotage { batch, ..plain() };
    vec![
        // Kernels' own ways to be wrong.
        (
            "the last row of a tile is not written",
            &["linear", "rms_norm", "experts", "attention", "select", "delta_net"],
            logits(|x, width| {
                let n = x.len() / width;
                if n > 8 {
                    x.copy_within((n - 2) * width..(n - 1) * width, (n - 1) * width);
                }
            }),
        ),
        (
            "a column behind the last whole tile is a little off",
            &["gated_act", "rms_norm", "rope", "split_heads", "causal_conv"],
            logits(|x, width| {
                if width > 33 {
                    x.chunks_exact_mut(width).for_each(|row| row[32] *= 1.001);
                }
            }),
        ),
        (
            "a row is divided by another row's sum",
            &["rms_norm", "attention", "head_norm", "gated_norm"],
            logits(|x, width| x[..width].iter_mut().for_each(|x| *x *= 1.0001)),
        ),
        (
            "NaN of one sequence reaches another",
            &["linear", "attention", "rms_norm", "delta_net", "causal_conv"],
            logits(|x, width| {
                if x.iter().any(|x| x.is_nan()) {
                    x[..width].fill(f32::NAN);
                }
            }),
        ),
        (
            "NaN is lost",
            &["add", "gated_act", "softcap", "rms_norm", "attention"],
            logits(|x, _| x.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = 0.0)),
        ),
        (
            "numbers go through f16",
            &["add", "scale", "gate_by"],
            logits(|x, _| x.iter_mut().for_each(|x| *x = x.clamp(-65504.0, 65504.0))),
        ),
        (
            "rows are counted with 15 bits",
            &["add", "select"],
            logits(|x, width| {
                let n_rows = x.len() / width;
                // Asked rows of a step of more than 32768 tokens are every 997th.
                let first = if n_rows > 32_768 { 32_768 } else { 32_768 / 997 };
                if n_rows > first {
                    x[first * width..].fill(0.0);
                }
            }),
        ),
        (
            "an array has room for 4096 numbers of the input",
            &["linear", "rms_norm"],
            plan(|plan| {
                for i in (0..plan.ops.len()).rev() {
                    let (Op::Linear { x, .. } | Op::RmsNorm { x, residual: None, .. }) = plan.ops[i] else { continue };
                    if plan.buf(x).width > 4096 {
                        forget_columns(plan, i, x, 4096);
                    }
                }
            }),
        ),
        (
            "a token's list of experts ends at 8",
            &["experts", "combine"],
            plan(|plan| {
                for i in (0..plan.ops.len()).rev() {
                    let Op::Combine { weights, .. } = plan.ops[i] else { continue };
                    if plan.buf(weights).width > 8 {
                        forget_columns(plan, i, weights, 8);
                    }
                }
            }),
        ),
        ("ids of experts are bytes", &["experts", "route"], plan(narrow_ids)),
        ("a NaN router row is no fault", &["route"], Sabotage { reports_faults: false, ..plain() }),
        // Memory of sequences.
        ("states are not copied", &["causal_conv", "delta_net"], Sabotage { copies_states: false, ..plain() }),
        (
            "states are forgotten between steps",
            &["causal_conv", "delta_net"],
            batch(|batch| batch.chunks.iter_mut().for_each(|c| c.pos = 0)),
        ),
        (
            "pages of a resumed sequence are read the other way round",
            &["kv_append", "attention"],
            batch(|batch| {
                for c in batch.chunks.iter().filter(|c| c.pos > 0) {
                    let end = (c.pos + c.len).div_ceil(backend::PAGE as u32);
                    batch.pages[c.first_page as usize..][..end as usize].reverse();
                }
            }),
        ),
        (
            "positions of a resumed sequence are off by one",
            &["kv_append", "attention", "rope"],
            batch(|batch| batch.chunks.iter_mut().filter(|c| c.pos > 0).for_each(|c| c.pos -= 1)),
        ),
        (
            "the row before the asked one is selected",
            &["select"],
            batch(|batch| {
                if batch.rows.len() == 1 && batch.rows[0] > 0 {
                    batch.rows[0] -= 1;
                }
            }),
        ),
        // Fields of ops that are not looked at.
        (
            "embed: scale",
            &["embed"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Embed { scale, .. } = op {
                        *scale = 1.0
                    }
                })
            }),
        ),
        (
            "linear: bias",
            &["linear"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Linear { parts, .. } = op {
                        parts.iter_mut().for_each(|p| p.bias = None)
                    }
                })
            }),
        ),
        (
            "gated_linear: gate and up change places",
            &["gated_linear"],
            plan(|p| {
                each(p, |op| {
                    if let Op::GatedLinear { gate, up, .. } = op {
                        std::mem::swap(gate, up)
                    }
                })
            }),
        ),
        (
            "rms_norm: residual",
            &["rms_norm"],
            plan(|p| {
                each(p, |op| {
                    if let Op::RmsNorm { residual, .. } = op {
                        *residual = None
                    }
                })
            }),
        ),
        (
            "rms_norm: eps",
            &["rms_norm"],
            plan(|p| {
                each(p, |op| {
                    if let Op::RmsNorm { eps, .. } = op {
                        *eps = 0.0
                    }
                })
            }),
        ),
        (
            "vectors stored less one",
            &["rms_norm"],
            plan(|p| p.weights.iter_mut().filter(|w| w.read == Read::OnePlus).for_each(|w| w.read = Read::Plain)),
        ),
        (
            "center: the mean stays",
            &["center"],
            plan(|p| {
                let widths: Vec<usize> = p.bufs.iter().map(|buf| buf.width).collect();
                each(p, |op| {
                    if let Op::Center { x, out } = *op {
                        *op = Op::SplitHeads { x, n_head: 1, parts: vec![(widths[out.0 as usize], out)] };
                    }
                });
            }),
        ),
        (
            "head_norm: w",
            &["head_norm"],
            plan(|p| {
                each(p, |op| {
                    if let Op::HeadNorm { w, .. } = op {
                        *w = None
                    }
                })
            }),
        ),
        ("rope: pairing", &["rope"], plan(|p| p.ropes.iter_mut().for_each(|rope| rope.pairing = RopePairing::Half))),
        ("rope: factor", &["rope"], plan(|p| p.ropes.iter_mut().for_each(|rope| rope.factor = 1.0))),
        (
            "rope: angles in single precision",
            &["rope"],
            plan(|p| p.ropes.iter_mut().flat_map(|rope| &mut rope.inv_freq).for_each(|f| *f = f64::from(*f as f32))),
        ),
        (
            "split_heads: order of the parts",
            &["split_heads"],
            plan(|p| {
                let parts = |op: &mut Op| match op {
                    Op::SplitHeads { parts, n_head, .. } if *n_head > 1 => parts.reverse(),
                    _ => {}
                };
                each(p, parts);
            }),
        ),
        (
            "join_heads: order of the parts",
            &["join_heads"],
            plan(|p| {
                each(p, |op| {
                    if let Op::JoinHeads { parts, .. } = op {
                        parts.reverse()
                    }
                })
            }),
        ),
        (
            "head_linear: matrices change places",
            &["head_linear"],
            plan(|p| {
                for decl in &mut p.weights {
                    if let Source::Slabs(slabs) = &mut decl.source {
                        slabs.reverse();
                    }
                }
            }),
        ),
        (
            "gated_act, gated_linear, experts: the activation",
            &["gated_act", "gated_linear", "experts"],
            plan(|p| {
                let silu = |op: &mut Op| match op {
                    Op::GatedAct { act, .. } | Op::GatedLinear { act, .. } | Op::Experts { act, .. } => {
                        *act = Gate::Silu
                    }
                    _ => {}
                };
                each(p, silu);
            }),
        ),
        (
            "add: x and y change places",
            &["add"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Add { x, y } = op {
                        std::mem::swap(x, y)
                    }
                })
            }),
        ),
        (
            "kv_append: queries see no more than a page",
            &["kv_append"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Attention { window, .. } = op {
                        *window = window.or(Some(32))
                    }
                })
            }),
        ),
        (
            "attention: the window is one too wide",
            &["attention"],
            plan(|p| {
                p.caches.iter_mut().for_each(|cache| cache.window = cache.window.map(|w| w + 1));
                each(p, |op| {
                    if let Op::Attention { window, .. } = op {
                        *window = window.map(|w| w + 1)
                    }
                });
            }),
        ),
        (
            "choose: one position less",
            &["choose"],
            plan(|p| {
                for op in p.ops.clone() {
                    if let Op::Choose { out, .. } = op {
                        let width = &mut p.bufs[out.0 as usize].width;
                        *width = (*width - 1).max(1);
                    }
                }
            }),
        ),
        (
            "choose: attention sees all",
            &["choose"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Attention { chosen, .. } = op {
                        *chosen = None
                    }
                })
            }),
        ),
        (
            "attention: softcap",
            &["attention"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Attention { softcap, .. } = op {
                        *softcap = None
                    }
                })
            }),
        ),
        (
            "attention: sinks",
            &["attention"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Attention { sinks, .. } = op {
                        *sinks = None
                    }
                })
            }),
        ),
        (
            "attention: scale",
            &["attention"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Attention { scale, .. } = op {
                        *scale *= 1.001
                    }
                })
            }),
        ),
        (
            "causal_conv: bias",
            &["causal_conv"],
            plan(|p| {
                each(p, |op| {
                    if let Op::CausalConv { bias, .. } = op {
                        *bias = None
                    }
                })
            }),
        ),
        (
            "causal_conv: silu follows always",
            &["causal_conv"],
            plan(|p| {
                each(p, |op| {
                    if let Op::CausalConv { silu, .. } = op {
                        *silu = true
                    }
                })
            }),
        ),
        (
            "delta_net: who shares a key",
            &["delta_net"],
            plan(|p| {
                each(p, |op| {
                    if let Op::DeltaNet { heads, .. } = op {
                        heads.sharing = Sharing::Grouped
                    }
                })
            }),
        ),
        (
            "delta_net: the rule",
            &["delta_net"],
            plan(|p| {
                each(p, |op| {
                    if let Op::DeltaNet { heads, .. } = op {
                        heads.rule = DeltaRule::Delta
                    }
                })
            }),
        ),
        (
            "delta_net: skip",
            &["delta_net"],
            plan(|p| {
                each(p, |op| {
                    if let Op::DeltaNet { skip, .. } = op {
                        *skip = None
                    }
                })
            }),
        ),
        (
            "gated_norm: the gate comes last",
            &["gated_norm"],
            plan(|p| {
                each(p, |op| {
                    if let Op::GatedNorm { gate_first, .. } = op {
                        *gate_first = false
                    }
                })
            }),
        ),
        (
            "decay_beta: the vector's own form",
            &["decay_beta"],
            plan(|p| p.weights.iter_mut().for_each(|w| w.read = Read::Plain)),
        ),
        (
            "decay_beta: bounds",
            &["decay_beta"],
            plan(|p| {
                each(p, |op| {
                    if let Op::DecayBeta { bound: Some(bound), .. } = op {
                        *bound *= 0.9
                    }
                })
            }),
        ),
        (
            "route: who is near",
            &["route"],
            plan(|p| {
                routers(p, |router| {
                    if let Score::Sparse { margin } = &mut router.score {
                        *margin *= 0.5
                    }
                })
            }),
        ),
        ("route: bias", &["route"], plan(|p| routers(p, |router| router.bias = None))),
        ("route: scales of experts", &["route"], plan(|p| routers(p, |router| router.expert_scale = None))),
        ("route: groups", &["route"], plan(|p| routers(p, |router| router.groups = None))),
        (
            "route: what a group is worth",
            &["route"],
            plan(|p| routers(p, |router| router.groups.iter_mut().for_each(|g| g.score = GroupScore::Max))),
        ),
        ("route: renormalisation", &["route"], plan(|p| routers(p, |router| router.renormalise = None))),
        ("route: score", &["route"], plan(|p| routers(p, |router| router.score = Score::Softmax))),
        ("route: scale", &["route"], plan(|p| routers(p, |router| router.scale = 1.0))),
        (
            "experts: biases",
            &["experts"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Experts { biases, .. } = op {
                        *biases = None
                    }
                })
            }),
        ),
        (
            "experts: gate and up change places",
            &["experts"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Experts { gate, up, .. } = op {
                        std::mem::swap(gate, up)
                    }
                })
            }),
        ),
        (
            "combine: add",
            &["combine"],
            plan(|p| {
                each(p, |op| {
                    if let Op::Combine { add, .. } = op {
                        *add = false
                    }
                })
            }),
        ),
        (
            "scale, scale_by, softcap, gate_by, add_bias, gelu, clamp, constant, input: nothing is done",
            &["scale", "scale_by", "softcap", "gate_by", "add_bias", "gelu", "clamp", "constant", "input"],
            plan(|p| {
                let nothing = |op: &mut Op| match *op {
                    Op::AddBias { x, .. }
                    | Op::Gelu { x, .. }
                    | Op::Clamp { x, .. }
                    | Op::Constant { out: x, .. }
                    | Op::Input { x, .. } => *op = Op::Scale { x, scale: 1.0 },
                    Op::Scale { x, .. } | Op::ScaleBy { x, .. } | Op::Softcap { x, .. } | Op::GateBy { x, .. } => {
                        *op = Op::Scale { x, scale: 1.0 };
                    }
                    _ => {}
                };
                each(p, nothing);
            }),
        ),
        (
            "gated_norm: the gate is another",
            &["gated_norm"],
            plan(|p| {
                let own = |op: &mut Op| {
                    // Gated by sigmoid instead of silu.
                    if let Op::GatedNorm { x, gate, .. } = *op {
                        *op = Op::GateBy { x, gate, factor: GateFactor::Sigmoid };
                    }
                };
                each(p, own);
            }),
        ),
    ]
}

fn routers(plan: &mut Plan, mut change: impl FnMut(&mut Router)) {
    each(plan, |op| {
        if let Op::Route { router, .. } = op {
            change(router)
        }
    });
}

/// A row for a backend, allowed what the CPU is allowed.
fn row_of(name: &str, how: Sabotage) -> Row {
    let cpu = backends::rows().swap_remove(1);
    Row { name: name.into(), backend: Arc::new(how), twin: None, ..cpu }
}

/// A case with its place among those of its op, whether it is the first of its type, and what the reference says.
type Known = (usize, bool, Case, Option<Vec<check::Answer>>);

/// The cases of ops, made when they are first looked at; those of f32 alone, in which nothing hides behind rounding.
#[derive(Default)]
pub struct Cases(Vec<(&'static str, Vec<Known>)>);

impl Cases {
    /// The first failure of an op's cases, of those that the row is given.
    pub fn caught(&mut self, row: &Row, op: &'static str) -> Option<String> {
        if self.0.iter().all(|(name, _)| *name != op) {
            let (_, cases) = OPS.iter().find(|(name, _)| *name == op).unwrap_or_else(|| panic!("no op {op}"));
            let mut seen = HashSet::new();
            let known = |(i, case): (usize, Case)| {
                let is_first = seen.insert((case.dtype.to_string(), case.plain));
                (i, is_first, case, None)
            };
            let mut cases: Vec<Known> = cases(1).into_iter().enumerate().map(known).collect();
            cases.retain(|(_, _, case, _)| case.dtype.act() == ActKind::F32);
            // Those of caches that are special come last, and take long: what they alone show is found first.
            if !cases[0].2.model.0.caches.is_empty() {
                cases.reverse();
            }
            self.0.push((op, cases));
        }
        let (_, cases) = self.0.iter_mut().find(|(name, _)| *name == op)?;
        let fails = |(i, is_first, case, exact): &mut Known| {
            if row.is_simulated && !is_sample(row, case, *i, *is_first) {
                return None;
            }
            let exact = exact.get_or_insert_with(|| check::exact(case));
            check::check(row, case, exact, &mut check::Given::default()).err()
        };
        let (at, failure) = cases.iter_mut().enumerate().find_map(|(at, case)| Some((at, fails(case)?)))?;
        // What shows one mistake often shows the next: each kernel that is changed is compiled for fewer cases.
        cases[..=at].rotate_right(1);
        Some(failure.to_string())
    }
}

#[test]
fn traps_are_caught() {
    let (mut shown, mut cases) = (Vec::new(), Cases::default());
    for (name, ops, how) in traps() {
        let row = row_of(name, how);
        for op in ops {
            let failure = cases.caught(&row, op).unwrap_or_else(|| panic!("{op} passes although {name}"));
            println!("{failure}");
            // A refusal would prove nothing: what is wrong must be in the numbers.
            let is_number = failure.contains(" wanted") || failure.contains(" logits");
            assert!(is_number && !failure.contains("compile plan"), "{failure}");
        }
        shown.extend(ops);
    }
    // Every op is in some trap.
    OPS.iter().for_each(|(name, _)| assert!(shown.contains(&name), "no trap for {name}"));
}

#[test]
fn a_failure_says_where() {
    let change = |x: &mut [f32], width| {
        if x.len() > width {
            x[width] += 0.5;
        }
    };
    let how = Sabotage { logits: change, ..Sabotage::of(Arc::new(Reference)) };
    let failure = Cases::default().caught(&row_of("a gpu", how), "linear").unwrap();
    for part in ["a gpu: linear f32, k ", "step 2: row 1 out column 0: ", " wanted; the row is off by "] {
        assert!(failure.contains(part), "{failure}");
    }
}

/// What is right passes through the same wrapper.
#[test]
fn nothing_wrong_is_caught() {
    let row = row_of("nothing", Sabotage::of(Arc::new(Reference)));
    for op in ["scale", "rope", "combine", "causal_conv"] {
        assert_eq!(Cases::default().caught(&row, op), None, "{op}");
    }
}
