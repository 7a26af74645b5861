//! Lightning attention (MiniMax-Text-01): two forms of config, factors of each part, decays that no file holds.

use model::plan::{Op, Plan, ValidPlan};

use crate::changed;

/// The publisher's config is read as transformers', and says how many dims of a head turn.
#[test]
fn lightning_attention_of_two_configs() {
    let transformers = changed("minimax", |_| ()).unwrap();
    let published = |rotary_dim: usize| {
        let rename = |config: &mut serde_json::Value| {
            let config = config.as_object_mut().unwrap();
            for (part, long) in [("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")] {
                for of in ["alpha", "beta"] {
                    let x = config.remove(&format!("{part}_{of}_factor")).unwrap();
                    config.insert(format!("layernorm_{long}_{of}"), x);
                }
            }
            config.remove("layer_types").unwrap();
            config.insert("rotary_dim".into(), rotary_dim.into());
            config.insert("model_type".into(), "minimax_text_01".into());
        };
        changed("minimax", rename).unwrap()
    };
    assert_eq!(published(12).ops, transformers.ops);
    assert_eq!(published(12).ropes, transformers.ropes);
    assert_eq!(published(8).ropes[0].inv_freq.len(), 4);
    let whole = changed("minimax", |config| config["rotary_dim"] = 8.into()).unwrap();
    assert_eq!(whole.ropes, transformers.ropes);

    let factors = |config: &mut serde_json::Value| {
        for (i, part) in ["linear_attn", "full_attn", "mlp"].into_iter().enumerate() {
            config[format!("{part}_alpha_factor")] = (1.5 + i as f64).into();
            config[format!("{part}_beta_factor")] = (0.5 + 0.25 * i as f64).into();
        }
    };
    let plan = changed("minimax", factors).unwrap();
    let scales = plan.ops.iter().filter_map(|op| match op {
        Op::Scale { scale, .. } => Some(*scale),
        Op::Route { router, .. } => Some(router.scale),
        _ => None,
    });
    let (lightning, full) = ([1.5, 0.5, 1.0, 3.5], [2.5, 0.75, 1.0, 3.5]);
    assert_eq!(scales.collect::<Vec<f32>>(), [lightning, lightning, full, lightning].concat());

    let refused = |key: &str, value: serde_json::Value, what: &str| {
        let error = changed("minimax", |config| config[key] = value).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused("postnorm", false.into(), "key postnorm: is false, expected residuals after the norms");
    refused("sliding_window", 64.into(), "key sliding_window: is 64, expected none");
    refused("head_dim", 13.into(), "key rotary_dim: would be 13, expected an even number");
}

/// Decays are those of `exp(-slope)` in the original code, and a plan's constants are numbers, one for each of a row.
#[test]
fn decays_that_no_file_holds() {
    let plan = changed("minimax", |_| ()).unwrap();
    let constants: Vec<usize> = (0..plan.ops.len()).filter(|&i| matches!(plan.ops[i], Op::Constant { .. })).collect();
    let values = |i: usize| match &plan.ops[constants[i]] {
        Op::Constant { values, .. } => values.clone(),
        _ => unreachable!(),
    };
    // A fourth, a sixteenth.. in the first of four layers, and 1e-5 of them in the last.
    let near = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-7;
    assert!(values(0).iter().zip([0.25, 0.0625, 0.015_625]).all(|(&g, slope)| near(g, (-slope * 1.00001f64).exp())));
    assert!(near(values(4)[0], (-0.25f64 * 1.333_33e-5).exp()));
    assert!((values(1), values(5)) == (vec![1.0; 4], vec![1.0; 4]));
    let broken = |change: fn(&mut Vec<f32>)| {
        let mut broken = Plan::clone(&plan);
        if let Op::Constant { values, .. } = &mut broken.ops[constants[0]] {
            change(values);
        }
        ValidPlan::new(broken).unwrap_err().to_string()
    };
    let error = broken(|values| values[2] = f32::NAN);
    assert!(error.contains("(constant): has a value that is not finite"), "{error}");
    let error = broken(|values| values.truncate(3));
    assert!(error.contains("(constant): g.0"), "{error}");
}
