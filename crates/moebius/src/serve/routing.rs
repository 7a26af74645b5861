//! `/v1/routing`: which experts the model's routers chose, layer by layer, counted over all answers. A chat request
//! with `"routing": true` gets the choices of every token with its events.

use std::sync::{Arc, Mutex};

use axum::Json;
use axum::response::IntoResponse;
use backend::RouterInfo;
use serde_json::{Value, json};

use super::app::App;
use super::routes::{Answer, Input};
use super::worker::lock;

/// What the routers chose since the server started.
#[derive(Debug)]
pub struct Routing {
    routers: Vec<RouterInfo>,
    counts_all: bool,
    counted: Mutex<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    tokens: u64,
    /// `[routers][n_expert]`.
    experts: Vec<Vec<u64>>,
}

impl Routing {
    /// Nothing yet. With `counts_all` every answer counts; without, those whose clients want to see their experts: on a
    /// GPU a trace costs a copy for every router and step.
    pub fn new(routers: &[RouterInfo], counts_all: bool) -> Routing {
        let experts = routers.iter().map(|router| vec![0; router.n_expert]).collect();
        Routing { routers: routers.to_vec(), counts_all, counted: Mutex::new(Counted { tokens: 0, experts }) }
    }

    /// Returns whether the experts of all answers are counted.
    pub fn counts_all(&self) -> bool {
        self.counts_all && !self.routers.is_empty()
    }

    /// The model's routers, in order of layers.
    pub fn routers(&self) -> &[RouterInfo] {
        &self.routers
    }

    /// Bytes that the experts of one token take.
    pub fn bytes_per_token(&self) -> usize {
        self.routers.iter().map(|router| router.n_used * size_of::<u16>()).sum()
    }

    /// Counts the experts of one token, those of all routers one after the other.
    pub fn count(&self, ids: &[u16]) {
        let mut counted = lock(&self.counted);
        counted.tokens += 1;
        let mut ids = ids.iter();
        for (router, experts) in self.routers.iter().zip(&mut counted.experts) {
            for &id in ids.by_ref().take(router.n_used) {
                experts.get_mut(usize::from(id)).into_iter().for_each(|n| *n += 1);
            }
        }
    }

    fn json(&self) -> Value {
        let counted = lock(&self.counted);
        let routers = self.routers.iter().zip(&counted.experts).map(|(router, counts)| {
            let RouterInfo { layer, n_expert, n_used } = router;
            json!({"layer": layer, "n_expert": n_expert, "n_used": n_used, "counts": counts})
        });
        let routers = routers.collect::<Vec<_>>();
        json!({"object": "routing", "tokens": counted.tokens, "complete": self.counts_all, "routers": routers})
    }
}

/// Returns the handler.
pub async fn handle(app: Arc<App>, _: Input) -> Answer {
    Ok(Json(app.worker.routing().json()).into_response())
}
