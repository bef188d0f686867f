//! Lists the repository; given a model, unloads it and loads it with another batch size.
//!
//! ```sh
//! cargo run -p dormouse-client --example repository -- http://127.0.0.1:8001 [MODEL]
//! ```
//!
//! Loading needs a server in control mode `explicit`.

use anyhow::Context;
use dormouse_client::{Client, LoadRequest};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().context("usage: repository URL [MODEL]")?;
    let client = Client::connect(&url).await?;
    if let Some(model) = arguments.next() {
        let config = client.model_config(&model, "").await?;
        let before = config.max_batch_size;
        client.unload(&model).await?;
        let json = format!(
            r#"{{"name": "{model}", "backend": "{}", "max_batch_size": {}}}"#,
            config.backend,
            before.max(1) * 2
        );
        client.load(LoadRequest::new(&model).config(json)).await?;
        let after = client.model_config(&model, "").await?.max_batch_size;
        eprintln!("{model}: max_batch_size {before} -> {after}");
    }
    for entry in client.repository_index(false).await? {
        eprintln!(
            "{} {} {} {}",
            entry.name, entry.version, entry.state, entry.reason
        );
    }
    Ok(())
}
