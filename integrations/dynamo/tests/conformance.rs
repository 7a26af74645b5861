//! Dynamo's own suite of what an engine must do.

mod common;

use dynamo_backend_common::testing::run_conformance;

#[tokio::test]
async fn the_engine_keeps_to_dynamos_contract() {
    run_conformance(|| common::engine("--parallel 8")).await.unwrap();
}
