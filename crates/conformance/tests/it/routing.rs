//! Router reports: the same from every backend for any choice of rows, and none unless tracing is on.
use backend::CacheType;
use backend::reference::Reference;
use backend::{Backend, RouterInfo};
use conformance::{PLAIN, Session, Shape, model, tokens};
use cpu::{Cpu, Isa};

#[test]
fn chosen_experts_are_reported_row_by_row() {
    let cpu = Cpu { isa: Isa::best(), threads: 2, cache: CacheType::F32, ..Cpu::default() };
    let backends: [&dyn Backend; 2] = [&Reference, &cpu];
    for shape in [PLAIN, Shape { fused: false, n_expert: 19, n_used: 8, ..PLAIN }] {
        let model = model(shape);
        let (a, b) = (tokens(40, 1), tokens(7, 2));
        let (mut seen, mut shares): (Vec<Vec<u16>>, Vec<Vec<f32>>) = Default::default();
        for backend in backends {
            let mut session = Session::new(backend, &model, 100);
            let routers = session.program.routers().to_vec();
            assert!(!routers.is_empty());
            for RouterInfo { n_expert, n_used, .. } in &routers {
                assert_eq!((*n_expert, *n_used), (shape.n_expert, shape.n_used));
            }
            let width: usize = routers.iter().map(|r| r.n_used).sum();
            session.program.trace_routing(true);
            session.step(&[(0, &a), (1, &b)]);
            // The same step once more, with fewer rows.
            let all = session.program.step(&session.batch).unwrap().routing.unwrap().to_vec();
            assert_eq!(all.len(), 47 * width);
            let weights = session.program.expert_weights().unwrap().to_vec();
            assert_eq!(weights.len(), all.len());
            // The best expert comes first. The router's scale is 1.25, and all of it is shared where it normalizes.
            for weights in weights.chunks_exact(shape.n_used) {
                let sum: f32 = weights.iter().sum();
                assert!(weights.is_sorted_by(|a, b| a >= b) && sum > 0.0 && sum < 1.25 + 1e-5, "{weights:?}");
                assert!(!shape.fused || (sum - 1.25).abs() < 1e-5, "{weights:?}");
            }
            session.batch.rows = vec![3, 39, 46];
            session.batch.asks.truncate(3);
            let some = session.program.step(&session.batch).unwrap().routing.unwrap().to_vec();
            let rows: Vec<u16> = [3, 39, 46].iter().flat_map(|r| &all[r * width..][..width]).copied().collect();
            assert_eq!(some, rows);
            let some = session.program.expert_weights().unwrap().to_vec();
            let rows: Vec<f32> = [3, 39, 46].iter().flat_map(|r| &weights[r * width..][..width]).copied().collect();
            assert_eq!(some, rows);
            for ids in all.chunks_exact(shape.n_used) {
                assert!(
                    ids.iter().enumerate().all(|(i, id)| (*id as usize) < shape.n_expert && !ids[..i].contains(id))
                );
            }
            session.program.trace_routing(false);
            assert_eq!(session.program.step(&session.batch).unwrap().routing, None);
            assert_eq!(session.program.expert_weights(), None);
            seen.push(all);
            shares.push(weights);
        }
        assert_eq!(seen[0], seen[1], "{shape:?}");
        for (a, b) in shares[0].iter().zip(&shares[1]) {
            assert!((a - b).abs() < 1e-2, "{a} and {b}");
        }
    }
}
