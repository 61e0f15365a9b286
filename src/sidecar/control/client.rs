//! The command line's side of the control service.

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use super::ControlAddress;
use crate::proto::control as wire;
use crate::proto::control::control_client::ControlClient;

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error(
        "no sidecar answers at {address}: {reason}\nhint: is it running, and with this --work-dir?"
    )]
    Unreachable { address: String, reason: String },
    #[error("{0}")]
    Refused(String),
    #[error("the sidecar's answer cannot be read: {0}")]
    Answer(#[from] serde_json::Error),
}

impl From<Status> for ControlError {
    fn from(status: Status) -> Self {
        Self::Refused(status.message().to_owned())
    }
}

/// What is asked of a running sidecar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    Status,
    Versions,
    /// None: the parent of the running version.
    Rollback(Option<String>),
    /// None: unpin.
    Pin(Option<String>),
    Pause,
    Resume,
    Purge,
}

/// Asks, and returns what to print: for a person, or as JSON.
///
/// # Errors
/// See [`ControlError`].
pub async fn ask(address: &ControlAddress, what: Ask, json: bool) -> Result<String, ControlError> {
    let mut client = connect(address).await?;
    let message = match what {
        Ask::Status => {
            let reply = client.status(wire::StatusRequest {}).await?.into_inner();
            let document: serde_json::Value = serde_json::from_str(&reply.json)?;
            return Ok(if json { pretty(&document) } else { status_text(&document) });
        }
        Ask::Versions => {
            let reply = client.versions(wire::VersionsRequest {}).await?.into_inner();
            return Ok(if json { versions_json(&reply) } else { versions_text(&reply) });
        }
        Ask::Rollback(version) => {
            let request = wire::RollbackRequest { version: version.unwrap_or_default() };
            client.rollback(request).await?.into_inner().message
        }
        Ask::Pin(version) => {
            let request = wire::PinRequest { version: version.unwrap_or_default() };
            client.pin(request).await?.into_inner().message
        }
        Ask::Pause => client.pause(wire::PauseRequest {}).await?.into_inner().message,
        Ask::Resume => client.resume(wire::ResumeRequest {}).await?.into_inner().message,
        Ask::Purge => client.purge(wire::PurgeRequest {}).await?.into_inner().message,
    };
    Ok(if json { pretty(&serde_json::json!({ "message": message })) } else { message })
}

async fn connect(address: &ControlAddress) -> Result<ControlClient<Channel>, ControlError> {
    let unreachable =
        |reason: String| ControlError::Unreachable { address: address.to_string(), reason };
    let channel = match address {
        ControlAddress::Socket(path) => {
            // tonic's own message says only "transport error"; this one says what is wrong.
            UnixStream::connect(path).await.map_err(|error| unreachable(error.to_string()))?;
            let path = path.clone();
            let connector = tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            Endpoint::from_static("http://control.local").connect_with_connector(connector).await
        }
        ControlAddress::Tcp(address) => {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))
                .map_err(|error| unreachable(error.to_string()))?;
            endpoint.connect().await
        }
    };
    let channel = channel.map_err(|error| {
        let reason = std::error::Error::source(&error)
            .map_or_else(|| error.to_string(), ToString::to_string);
        unreachable(reason)
    })?;
    Ok(ControlClient::new(channel))
}

fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}")
}

fn versions_json(reply: &wire::VersionsReply) -> String {
    let versions: Vec<_> = reply
        .versions
        .iter()
        .map(|version| {
            serde_json::json!({
                "version": version.version,
                "parent": version.parent,
                "state": version.state,
                "checksum": version.checksum,
                "created_unix": version.created_unix,
                "gate_before": version.gate_before,
                "gate_after": version.gate_after,
                "swap_stall_ms": version.swap_stall_ms,
                "live_acceptance": version.live_acceptance,
            })
        })
        .collect();
    pretty(&serde_json::json!({ "versions": versions }))
}

fn versions_text(reply: &wire::VersionsReply) -> String {
    let mut text = format!(
        "{:<9} {:<12} {:<9} {:>7} {:>7} {:>7} {:>9}\n",
        "VERSION", "STATE", "PARENT", "BEFORE", "AFTER", "LIVE", "STALL ms"
    );
    for version in &reply.versions {
        let gated = !version.parent.is_empty();
        let score = |value: f64| if gated { format!("{value:.3}") } else { "-".into() };
        let live = version.live_acceptance.map_or("-".into(), |live| format!("{live:.3}"));
        text.push_str(&format!(
            "{:<9} {:<12} {:<9} {:>7} {:>7} {:>7} {:>9.1}\n",
            version.version,
            version.state,
            if gated { &version.parent } else { "-" },
            score(version.gate_before),
            score(version.gate_after),
            live,
            version.swap_stall_ms,
        ));
    }
    text.trim_end().to_owned()
}

fn status_text(document: &serde_json::Value) -> String {
    let field = |pointer: &str| match document.pointer(pointer) {
        Some(serde_json::Value::String(text)) => text.clone(),
        Some(serde_json::Value::Null) | None => "-".into(),
        Some(other) => other.to_string(),
    };
    let running = field("/running");
    let live = document["versions"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|version| version["version"] == running.as_str())
        .and_then(|version| version.pointer("/live/acceptance_rate")?.as_f64())
        .map_or("no data yet".into(), |rate| format!("acceptance {rate:.3}"));
    let up = if document["upstream"]["up"] == true { "up" } else { "down" };
    let mut lines = vec![
        format!("running   {running} ({live}), served: {}", field("/serving")),
        format!("upstream  {} {up}", field("/upstream/url")),
        format!(
            "learning  {}, {} rounds, {} tokens, {} restarts of the trainer",
            field("/trainer/phase"),
            field("/training/rounds"),
            field("/training/tokens"),
            field("/trainer/restarts"),
        ),
        format!(
            "store     {} samples, {} scored, {} learned, {} held out, {} bytes",
            field("/store/samples"),
            field("/store/scored"),
            field("/store/learned"),
            field("/store/held_out"),
            field("/store/bytes"),
        ),
        format!(
            "swaps     {} done, {} failed, {} rolled back",
            field("/counters/swaps"),
            field("/counters/swap_failures"),
            field("/counters/rollbacks"),
        ),
    ];
    for (name, pointer) in
        [("pinned", "/pinned"), ("error", "/upstream/error"), ("trainer", "/trainer/last_error")]
    {
        if field(pointer) != "-" {
            lines.push(format!("{name:<9} {}", field(pointer)));
        }
    }
    if document["paused"] == true {
        lines.push("paused    by an operator".into());
    }
    lines.join("\n")
}
