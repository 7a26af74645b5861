//! What is kept of a sequence and read back: keys and values in blocks, and choices of positions.

use backend::KvType;
use backend::reference::Rounded;

use super::*;

/// Keys and values in blocks of 8 bits, by every kernel that writes or reads them.
#[test]
fn caches_of_blocks_agree_with_the_reference() {
    let wide = Shape { n_head: 4, n_kv: 2, d_k: 64, d_v: 128, window: Some(20), ..SMALL };
    let models = [model(Shape { d_k: 32, d_v: 64, ..SMALL }), model(wide), crate::latent::of_blocks()];
    for (cache, n) in [
        (CacheType::Q8_0, models.len()),
        (CacheType { k: KvType::Q8_0, v: KvType::F32 }, 2),
        (CacheType { k: KvType::F16, v: KvType::Q8_0 }, 2),
    ] {
        let Some(metal) = simulated(cache, Options::default()) else { return };
        let metal = Metal { tuning: FINE, ..metal };
        for (i, model) in models[..n].iter().enumerate() {
            let plan = metal.lower(ValidPlan::new(model.0.clone()).unwrap()).unwrap().into_plan();
            let found = run(&metal, &(plan, Arc::clone(&model.1)));
            let error = relative(&found, &run(&Rounded(cache), model));
            println!("{cache}, model {i}: {error:.2e}");
            // A number at the border of two integers may become the other one.
            assert!(error <= 1e-4, "{cache}, model {i}: off by {error:e}");
        }
    }
    let metal = simulated(CacheType::Q4_0, Options::default()).unwrap();
    let refused = Session::compile(&metal, &models[0], 64, 64).err().unwrap().to_string();
    assert!(refused.contains("Metal supports f16, f32 and q8_0"), "{refused}");
}

/// Models that choose the positions that attention sees, one of whose layers share a choice.
#[test]
fn chosen_positions_give_golden_logits() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    for folder in ["published/deepseek_v32", "published/glm_moe_dsa_shared"] {
        let golden = std::fs::read(data().join(folder).join("golden.safetensors")).unwrap();
        let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
        let words = |name: &str| golden.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let ids: Vec<u32> = words("tokens").into_iter().map(u32::from_le_bytes).collect();
        let exact: Vec<f32> = words("logits").into_iter().map(f32::from_le_bytes).collect();
        let model = of_file(&metal, &format!("{folder}/hf"));
        let whole = |metal: &Metal| Session::new(metal, &model, ids.len()).step(&[(0, &ids)]).to_vec();
        let first = whole(&metal);
        let error = relative(&first, &exact);
        println!("{folder}: {error:.2e}, {} tokens", ids.len());
        assert!(error <= 1e-5, "{folder}: off by {error:e}");
        let options = Options { schedule: Schedule::Random, ..Options::default() };
        assert_eq!(bits(&whole(&simulated(CacheType::F32, options).unwrap())), bits(&first), "{folder}");
        // Plain kernels, and chunks that cross from all positions to chosen ones.
        let plain = Metal { tuning: Tuning { is_plain: true, off: Off::ALL, ..FINE }, ..metal.clone() };
        for metal in [&metal, &plain] {
            let mut session = Session::new(metal, &model, ids.len());
            let cut: Vec<f32> = ids.chunks(7).flat_map(|chunk| session.step(&[(0, chunk)]).to_vec()).collect();
            let error = relative(&cut, &exact);
            assert!(error <= 1e-5, "{folder} in chunks of 7: off by {error:e}");
        }
    }
}

/// A step whose ranks have no room side by side goes in slices, with the same bits.
#[test]
fn choices_go_in_slices() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let model = of_file(&metal, "published/deepseek_v32/hf");
    let ids: Vec<u32> = tokens(70, 3).into_iter().map(|id| id % model.0.n_vocab as u32).collect();
    let run = |max_positions| {
        let mut session = Session::with(&metal, &model, max_positions, 72);
        session.step(&[(0, &ids[..5]), (1, &ids[5..])]).to_vec()
    };
    assert_eq!(bits(&run(1 << 14)), bits(&run(96)));
}
