//! What the server says about itself: models, health, numbers, its own description.

use std::sync::Arc;

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use engine::scheduler::Stats;
use serde_json::{Value, json};

use crate::{embedded, sampling};

use super::app::ModelInfo;
use super::error::ApiError;
use super::fleet::Fleet;
use super::openapi;
use super::routes::{Answer, Input};
use super::worker::usage_share;

fn model_json(model: &ModelInfo, status: &Value) -> Value {
    let description = match model.embedded {
        true => format!("{}: {}", model.description, embedded::ABOUT),
        false => model.description.clone(),
    };
    json!({
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "moebius",
        // Anthropic's clients read these two.
        "type": "model",
        "display_name": model.id,
        "max_model_len": model.context,
        // As llama-server has it: unloaded, loading or loaded.
        "status": status,
        "meta": {
            "description": description,
            "embedded": model.embedded,
            "has_template": model.has_template,
            "sees_images": model.sees_images,
            "sampling": sampling::json(&model.sampling),
            "n_params": model.n_params,
            "size": model.size_bytes,
            "n_vocab": model.n_vocab,
            "n_ctx": model.context,
        },
    })
}

pub async fn models(fleet: Arc<Fleet>, _: Input) -> Answer {
    let mut list = fleet.list(model_json);
    // Clients offer for choice what is listed.
    for (name, of) in fleet.aliases() {
        if let Some(mut model) = list.iter().find(|model| model["id"] == of[..]).cloned() {
            (model["id"], model["display_name"], model["alias_of"]) = (name.clone().into(), name.into(), of.into());
            list.push(model);
        }
    }
    let (first, last) = (list.first().map(|model| model["id"].clone()), list.last().map(|model| model["id"].clone()));
    let list = json!({"object": "list", "data": list, "has_more": false, "first_id": first, "last_id": last});
    Ok(Json(list).into_response())
}

pub async fn model(fleet: Arc<Fleet>, input: Input) -> Answer {
    let name = input.tail.unwrap_or_default();
    match fleet.has(&name) {
        true => Ok(Json(fleet.tell(Some(&name), model_json)?).into_response()),
        false => Err(fleet.unknown(&name)),
    }
}

/// 200 while the engines' threads live.
pub async fn health(fleet: Arc<Fleet>, _: Input) -> Answer {
    if !fleet.alive() {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the engine has stopped"));
    }
    Ok(Json(json!({"status": "ok"})).into_response())
}

/// 200 while requests are taken; with what the engines are busy with.
pub async fn ready(fleet: Arc<Fleet>, input: Input) -> Answer {
    if fleet.common.draining() {
        return Err(ApiError::stopping());
    }
    let is_known = input.is_known;
    health(fleet.clone(), input).await?;
    if !is_known {
        return Ok(Json(json!({"status": "ok"})).into_response());
    }
    let loaded = fleet.all_loaded();
    let stats: Vec<Stats> = loaded.iter().map(|app| app.worker.stats()).collect();
    let status = json!({
        "status": "ok",
        "model": loaded.first().map(|app| app.model.id.clone()),
        "models": loaded.iter().map(|app| app.model.id.clone()).collect::<Vec<_>>(),
        "running": stats.iter().map(|stats| stats.running).sum::<usize>(),
        "waiting": stats.iter().map(|stats| stats.waiting).sum::<usize>(),
        "kv_usage": stats.iter().map(|stats| usage_share(stats.pages)).fold(0.0, f64::max),
    });
    Ok(Json(status).into_response())
}

pub async fn metrics(fleet: Arc<Fleet>, _: Input) -> Answer {
    let loaded = fleet.all_loaded();
    let models: Vec<(&str, Stats)> = loaded.iter().map(|app| (app.model.id.as_str(), app.worker.stats())).collect();
    let text = fleet.common.metrics.text(&models);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

pub async fn openapi(_: Arc<Fleet>, _: Input) -> Answer {
    Ok(Json(openapi::document()).into_response())
}
