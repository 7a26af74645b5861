//! The test at the first start: kernels that are wrong on a GPU are named and replaced.

use super::recorder::recorder;
use super::*;

/// The test at the first start passes on the simulator, and names the form that a changed kernel breaks.
#[test]
fn the_self_test_finds_a_broken_form() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let products = |types| {
        let (plan, _) = model(Shape { types, d_model: 256, d_ff: 256, ..SMALL });
        Plan { caches: Vec::new(), states: Vec::new(), ops: Vec::new(), layers: Vec::new(), ..plan }
    };
    let right = rewritten("linear", "", "").self_test(&products([Q4_0, F16, Q6_K, F32, Q8_0]));
    assert_eq!(right.unwrap(), (FINE, Vec::new()));
    // Every type has the same tiles.
    let broken = |from, to| rewritten("linear", from, to).self_test(&products([Q4_0; 5]));
    let (tuning, wrong) = broken("= *(device const float4*)(x0 +", "= 2.0f * *(device const float4*)(x0 +").unwrap();
    assert!(!wrong.is_empty() && wrong.iter().all(|why| why.contains("in tiles")), "{wrong:?}");
    assert_eq!(tuning, Tuning { is_plain: true, ..FINE });
    let plain = broken("first + i < row.n) sum += v[i]", "first + i + 1 < row.n) sum += v[i]").unwrap_err();
    assert!(plain.to_string().contains("plain"), "{plain}");
}

/// Every other kind of kernel is tried too: a wrong one is named, its plain kernels take its place, and a plan then
/// gives the right answer; where these are wrong as well the GPU is refused.
#[test]
fn the_self_test_finds_broken_kernels_of_every_kind() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let shapes = [SMALL, SMALL_DELTA].map(|shape| model(Shape { types: [F32; 5], ..shape }));
    let off = Off::NONE;
    // The model, the kernel and what is changed in it; the kind that is named, and what is turned off.
    let cases = [
        (0, "attention_tiles", "a.scale", "a.scale * 1.5f", "attention: off by", Off { attention: true, ..off }),
        (
            0,
            "heads",
            "row[second] = x * s + y * c;",
            "row[second] = x * s - y * c;",
            "attention: ",
            Off { attention: true, ..off },
        ),
        (
            0,
            "experts_sum",
            "beside[j]) + all[j];",
            "beside[j]) - all[j];",
            "experts: off by",
            Off { experts: true, ..off },
        ),
        (0, "expert_groups", "", "", "", off),
        (0, "norms", "x0[at + i] = v;", "x0[at + i] = v + 1.0f;", "norms: off by", Off { norms: true, ..off }),
        (1, "delta_in", "sigmoid(sum)", "sigmoid(sum) * 1.1f", "delta rules: off by", Off { delta: true, ..off }),
    ];
    for (i, kernel, from, to, why, off) in cases {
        let metal = rewritten(kernel, from, to);
        let (tuning, said) = metal.self_test(&shapes[i].0).unwrap();
        assert_eq!(tuning, Tuning { off, ..FINE }, "{kernel}: {said:?}");
        assert_eq!(said.len(), usize::from(!why.is_empty()), "{kernel}: {said:?}");
        assert!(said.iter().all(|line| line.starts_with(why) && line.ends_with("plain kernels are used instead")));
        let error =
            relative(&short(&Metal { tuning, ..metal }, &shapes[i]), &short(&rewritten("", "", ""), &shapes[i]));
        assert!(error < 1e-5, "{kernel}: off by {error:e} with plain kernels");
    }
    // The plain kernel itself.
    let refused = rewritten("attention", "s *= a.scale;", "s *= 1.5f * a.scale;").self_test(&shapes[0].0).unwrap_err();
    assert!(refused.to_string().contains("attention, with plain kernels: off by"), "{refused}");
    let latent = rewritten("latent_in", "cache + page", "cache + 0 * page")
        .self_test(&of_file(&recorder(&Arc::default()), "deepseekv3/model-q5_1.gguf").0);
    let (tuning, said) = latent.unwrap();
    assert_eq!(tuning, Tuning { off: Off { latent: true, ..off }, ..FINE }, "{said:?}");
}

/// The backend on a simulated GPU of which one kernel is changed.
fn rewritten(kernel: &'static str, from: &'static str, to: &'static str) -> Metal {
    Metal { tuning: FINE, ..backends::rewritten(Options::default(), kernel, from, to) }
}
