//! Hidden rows behind the logits: the same from every backend, in the order of the rows, intact at the end.
use backend::Backend;
use backend::CacheType;
use backend::reference::Reference;
use conformance::{PLAIN, Session, Shape, model, tokens};
use cpu::{Cpu, Isa};

#[test]
fn hidden_rows_come_with_their_logits() {
    let cpu = Cpu { isa: Isa::best(), threads: 2, cache: CacheType::F32, ..Cpu::default() };
    let backends: [&dyn Backend; 2] = [&Reference, &cpu];
    for shape in [PLAIN, Shape { fused: false, ..PLAIN }] {
        let model = model(shape);
        let d = shape.d_model;
        let (a, b) = (tokens(40, 1), tokens(7, 2));
        let mut seen: Vec<Vec<f32>> = Vec::new();
        for backend in backends {
            let mut session = Session::new(backend, &model, 100);
            session.step(&[(0, &a), (1, &b)]);
            let all = session.program.step(&session.batch).unwrap().hidden.to_vec();
            assert_eq!(all.len(), 47 * d);
            session.batch.rows = vec![3, 39, 46];
            session.batch.asks.truncate(3);
            let output = session.program.step(&session.batch).unwrap();
            let rows: Vec<f32> = [3, 39, 46].iter().flat_map(|r| &all[r * d..][..d]).copied().collect();
            assert_eq!(output.hidden, rows);
            assert_eq!(output.logits.len(), 3 * conformance::N_VOCAB);
            seen.push(all);
        }
        let size = seen[0].iter().map(|x| x * x).sum::<f32>().sqrt();
        let error = seen[0].iter().zip(&seen[1]).map(|(x, y)| (x - y) * (x - y)).sum::<f32>().sqrt();
        assert!(size > 1.0 && error < 1e-4 * size, "{shape:?}: {error} of {size}");
    }
}
