//! Which routed experts lie on the device and which in host memory, layer by layer: plain arithmetic, the same for the
//! account of memory and for the program. Knows no driver.

use model::plan::{Op, Plan, Weight, WeightDecl};

use backend::residency::{Policy, Residencies, Residency};
use cpu::Cpu;

/// What the host computes for a device that does not hold all routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Bytes of the device's memory for routed experts.
    pub room: usize,
    /// Rows of a step from which experts are copied to the device instead; measured when it is not given.
    pub copies_from: Option<usize>,
    /// Threads, instruction set and whether experts are copied to memory with large pages.
    pub cpu: Cpu,
    /// When experts that are used most get slots on the device, in place of whole layers.
    pub moves: Moves,
}

impl Host {
    /// Whether experts in host memory are read from disk when they are wanted.
    pub fn is_streamed(&self) -> bool {
        matches!(self.cpu.residency, Policy::Stream { .. })
    }
}

/// When single experts take slots on the device: which ones have them, and so the last bits of results, depends on what
/// was computed before and on how long copies took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// Never: whole layers stay where they are.
    Never,
    /// As long as that is measured to be faster.
    WhenFaster,
    /// From the second step on.
    Always,
}

/// Slots of single experts of a layer, in the memory that whole layers have otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Its place in the plan.
    pub op: usize,
    /// Experts of the layer.
    pub n_expert: usize,
    /// Number of slots.
    pub n: usize,
    /// Where the stacks of gate, up and down begin in that memory.
    pub stacks: [usize; 3],
    /// Lengths of the planes of an expert's gate, up and down.
    pub lens: [[usize; 3]; 3],
}

impl Slots {
    /// Where the planes of a stack begin in the memory of all slots.
    pub fn planes(&self, stack: usize) -> [usize; 3] {
        let (starts, _) = plane_starts(self.lens[stack].map(|len| len * self.n));
        starts.map(|start| self.stacks[stack] + start)
    }

    /// Bytes of all of them.
    fn bytes(&self) -> usize {
        self.lens.iter().map(|lens| plane_starts(lens.map(|len| len * self.n)).1).sum()
    }
}

/// The routed experts of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its place in the plan.
    pub op: usize,
    /// Its gate, by which it is found.
    gate: Weight,
    /// Bytes of its three stacks in device memory.
    pub bytes: usize,
    /// Bytes of those that a token reads.
    pub token_bytes: usize,
    /// Whether they lie in host memory.
    pub is_host: bool,
}

/// Where the routed experts of a plan lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    layers: Vec<Layer>,
}

impl Split {
    /// As many layers on the device as `room` bytes hold, spread over the depth of the model, so that copies of some
    /// layers run beside the work of others.
    pub fn new(plan: &Plan, room: usize) -> Split {
        let mut layers = layers(plan);
        let bytes: Vec<usize> = layers.iter().map(|layer| layer.bytes).collect();
        for (layer, is_device) in layers.iter_mut().zip(choose(&bytes, room)) {
            layer.is_host = !is_device;
        }
        Split { layers }
    }

    /// Everything on the device.
    pub fn none() -> Split {
        Split::default()
    }

    /// Whether the experts with these gates lie in host memory.
    pub fn is_host(&self, gate: Weight) -> bool {
        self.layers.iter().any(|layer| layer.gate == gate && layer.is_host)
    }

    /// The number of the layer whose experts have this gate.
    pub fn position(&self, gate: Weight) -> Option<usize> {
        self.layers.iter().position(|layer| layer.gate == gate)
    }

    /// Where a layer that lies on the device begins in the memory of all of those.
    pub fn offset(&self, layer: usize) -> usize {
        self.layers[..layer].iter().filter(|layer| !layer.is_host).map(|layer| layer.bytes).sum()
    }

    /// Slots of every layer in the memory of those on the device, as many as it holds, spread evenly; none where no
    /// layer lies there or in host memory, where it does not hold one for each layer, and where experts have biases.
    pub fn slots(&self, plan: &Plan) -> Vec<Slots> {
        let room = self.bytes()[0];
        let none = |layer: &Layer| {
            // Slots are no numbers of experts, by which biases are found.
            let Op::Experts { gate, up, down, biases: None, .. } = plan.ops[layer.op] else { return None };
            let n_expert = plan.weight(gate).shape[0].max(1);
            let lens = |w| Some(plane_lens(plan.weight(w))?.map(|len| len / n_expert));
            let lens = [lens(gate)?, lens(up)?, lens(down)?];
            Some(Slots { op: layer.op, n_expert, n: 0, stacks: [0; 3], lens })
        };
        let Some(mut slots) = self.layers.iter().map(none).collect::<Option<Vec<_>>>() else { return Vec::new() };
        let mut taken: usize = 0;
        // One more for a layer after the other, until one has no room.
        'full: while !slots.is_empty() {
            for layer in &mut slots {
                let more = Slots { n: layer.n + 1, ..*layer };
                let needed = taken - layer.bytes() + more.bytes();
                if needed > room || more.n > more.n_expert {
                    break 'full;
                }
                (taken, *layer) = (needed, more);
            }
        }
        let mut at = 0;
        for layer in &mut slots {
            for stack in 0..3 {
                layer.stacks[stack] = at;
                at += plane_starts(layer.lens[stack].map(|len| len * layer.n)).1;
            }
        }
        let is_parted = self.host().next().is_some() && slots.iter().all(|layer| layer.n > 0);
        if is_parted { slots } else { Vec::new() }
    }

    /// The layers, in order.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Those in host memory.
    pub fn host(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().filter(|layer| layer.is_host)
    }

    /// How many layers before this one are in host memory. Several ops may compute experts of one layer.
    pub fn hosts_before(&self, layer: usize) -> usize {
        self.layers[..layer].iter().filter(|layer| layer.is_host).count()
    }

    /// Bytes of the device's memory for the experts of a layer on their way: of the largest, of all layers where single
    /// experts may have slots.
    pub fn stage_bytes(&self, has_slots: bool) -> usize {
        let staged = self.layers.iter().filter(|layer| layer.is_host || has_slots);
        staged.map(|layer| layer.bytes).max().unwrap_or(0)
    }

    /// Bytes of experts on the device, and in host memory.
    pub fn bytes(&self) -> [usize; 2] {
        self.sum(|layer| layer.bytes)
    }

    /// The same of those that a token reads.
    pub fn token_bytes(&self) -> [usize; 2] {
        self.sum(|layer| layer.token_bytes)
    }

    fn sum(&self, of: impl Fn(&Layer) -> usize) -> [usize; 2] {
        let side = |is_host| {
            let layers = self.layers.iter().filter(|layer| layer.is_host == is_host);
            layers.fold(0usize, |sum, layer| sum.saturating_add(of(layer)))
        };
        [side(false), side(true)]
    }
}

/// Where the planes of a matrix, or of a stack of them, begin in device memory, and how many bytes they take.
pub fn plane_starts(lens: [usize; 3]) -> ([usize; 3], usize) {
    let scales = lens[0].next_multiple_of(256);
    let biases = (scales + lens[1]).next_multiple_of(256);
    // Kernels read whole words, past the end of a plane where it ends within one.
    ([0, scales, biases], biases + lens[2].next_multiple_of(256))
}

/// The lengths of the planes of a stack; none where its rows are not whole blocks.
pub fn plane_lens(decl: &WeightDecl) -> Option<[usize; 3]> {
    let k = decl.shape.last().copied().filter(|&k| k > 0)?;
    let planes = decl.dtype.plane_bytes(k)?.times(decl.n_values() / k)?;
    Some([planes.q, planes.scales, planes.biases])
}

/// The ops whose experts may lie in host memory: no other op reads their stacks as a whole, and no two share one.
fn layers(plan: &Plan) -> Vec<Layer> {
    let table = Residencies::new(plan, Policy::Stream { slabs: 0 });
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for (op, ops) in plan.ops.iter().enumerate() {
        let Op::Experts { ids, gate, up, down, .. } = *ops else { continue };
        let stacks = [gate, up, down];
        let is_own = stacks.iter().all(|&w| table.of(w) == Residency::Streamed && !seen.contains(&w));
        seen.extend(stacks);
        let bytes = stacks.iter().try_fold(0usize, |sum, &w| {
            let (_, bytes) = plane_starts(plane_lens(plan.weight(w))?);
            sum.checked_add(bytes)
        });
        if let (true, Some(bytes)) = (is_own, bytes) {
            let n_expert = plan.weight(gate).shape[0].max(1);
            let token_bytes = bytes / n_expert * plan.buf(ids).width.min(n_expert);
            found.push(Layer { op, gate, bytes, token_bytes, is_host: false });
        }
    }
    found
}

/// Which of these layers lie in `room` bytes: as many bytes as there can be, layers of one size evenly spread.
fn choose(bytes: &[usize], room: usize) -> Vec<bool> {
    let mut groups: Vec<(usize, usize)> = Vec::new(); // size, layers
    for &size in bytes {
        match groups.iter_mut().find(|(known, _)| *known == size) {
            Some((_, n)) => *n += 1,
            None => groups.push((size, 1)),
        }
    }
    let (_, counts) = best(&groups, room, TRIES);
    let mut passed = vec![0; groups.len()];
    let is_in = |size: &usize| {
        let Some(at) = groups.iter().position(|(known, _)| known == size) else { return false };
        let (n, taken) = (groups[at].1, counts[at]);
        passed[at] += 1;
        passed[at] * taken / n > (passed[at] - 1) * taken / n
    };
    bytes.iter().map(is_in).collect()
}

/// Combinations that are tried: models have layers of a few sizes.
const TRIES: usize = 2_000;

/// The most bytes that layers of these sizes fill in `room`, and how many there are of each. Past the number of tries
/// sizes are taken in turn, as many layers of each as fit.
fn best(groups: &[(usize, usize)], room: usize, tries: usize) -> (usize, Vec<usize>) {
    let Some((&(size, n), rest)) = groups.split_first() else { return (0, Vec::new()) };
    let most = room.checked_div(size).unwrap_or(n).min(n);
    let tries = tries / (most + 1);
    let least = if rest.is_empty() || tries == 0 { most } else { 0 };
    let tried = (least..=most).map(|count| {
        let (taken, mut counts) = best(rest, room - count * size, tries);
        counts.insert(0, count);
        (taken + count * size, counts)
    });
    tried.max_by_key(|(taken, _)| *taken).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(bytes: &[usize], is_in: &[bool]) -> usize {
        bytes.iter().zip(is_in).filter(|(_, is_in)| **is_in).map(|(n, _)| n).sum()
    }

    /// Qwen3-30B-A3B in Q4_K_M: down is of Q6_K in half of the layers.
    fn mixed() -> Vec<usize> {
        (0..48).map(|i| if (6..42).contains(&i) && i % 3 != 0 { 339 } else { 392 }).collect()
    }

    #[test]
    fn what_is_chosen_fits_and_wastes_less_than_the_smallest_layer() {
        let many = (0..20).map(|i| 100 + 7 * i).collect();
        for bytes in [mixed(), vec![100; 48], vec![7], vec![5, 900, 20, 20, 3], vec![0, 0, 4], many, vec![]] {
            let all: usize = bytes.iter().sum();
            for percent in 0..=110 {
                let room = all * percent / 100;
                let is_in = choose(&bytes, room);
                let taken = total(&bytes, &is_in);
                assert!(taken <= room, "{taken} of {room}: {bytes:?}");
                let smallest = bytes.iter().zip(&is_in).filter(|(_, is_in)| !**is_in).map(|(n, _)| *n).min();
                assert!(smallest.is_none_or(|n| n > room - taken), "{room}: {is_in:?}");
                assert!(room < all || taken == all);
            }
        }
    }

    #[test]
    fn layers_of_two_sizes_fill_the_room() {
        let bytes = mixed();
        let n_of = |size: usize| bytes.iter().filter(|&&n| n == size).count();
        let best = |room: usize| {
            let sums = (0..=n_of(339)).flat_map(|small| (0..=n_of(392)).map(move |large| small * 339 + large * 392));
            sums.filter(|&sum| sum <= room).max().unwrap_or(0)
        };
        for room in (0..18_000).step_by(10) {
            assert_eq!(total(&bytes, &choose(&bytes, room)), best(room), "{room}");
        }
        let is_in = choose(&bytes, 3900);
        let first_half = is_in[..24].iter().filter(|is_in| **is_in).count();
        assert!((4..=6).contains(&first_half), "{is_in:?}");
    }

    #[test]
    fn slots_of_all_layers_lie_apart_in_the_memory_of_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
        let checkpoint = checkpoint::open(path.as_ref()).expect("the embedded model opens");
        let plan = Plan::clone(&model::build(&checkpoint).expect("and is built"));
        let all = Split::new(&plan, usize::MAX).bytes()[0];
        assert!(Split::new(&plan, all).slots(&plan).is_empty() && Split::new(&plan, 0).slots(&plan).is_empty());
        for percent in [20, 50, 75, 95] {
            let split = Split::new(&plan, all / 100 * percent);
            let (room, slots) = (split.bytes()[0], split.slots(&plan));
            let mut parts: Vec<(usize, usize)> = Vec::new();
            for layer in &slots {
                assert!((1..=layer.n_expert).contains(&layer.n));
                for stack in 0..3 {
                    let planes = layer.planes(stack).into_iter().zip(layer.lens[stack]);
                    parts.extend(planes.filter(|(_, len)| *len > 0).map(|(at, len)| (at, at + len * layer.n)));
                }
            }
            parts.sort_unstable();
            assert!(parts.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{percent}: {parts:?}");
            assert!(parts.last().is_some_and(|last| last.1 <= room));
            // Less is left than one more for each layer takes.
            let one: usize = slots.iter().map(|layer| layer.lens.iter().flatten().sum::<usize>() + 3 * 256).sum();
            let taken: usize = parts.iter().map(|(from, to)| to - from).sum();
            assert!(room - taken < one, "{percent}: {taken} of {room}");
            let n: Vec<usize> = slots.iter().map(|layer| layer.n).collect();
            assert!(n.iter().max().zip(n.iter().min()).is_some_and(|(most, least)| most - least <= 1), "{n:?}");
        }
    }

    #[test]
    fn planes_begin_at_multiples_of_256_and_do_not_overlap() {
        for lens in [[1, 0, 0], [256, 1, 1], [1000, 300, 77], [0, 0, 0]] {
            let (starts, bytes) = plane_starts(lens);
            assert!(starts.iter().all(|at| at % 256 == 0));
            assert!(
                starts[0] + lens[0] <= starts[1] && starts[1] + lens[1] <= starts[2] && starts[2] + lens[2] <= bytes
            );
        }
    }
}
