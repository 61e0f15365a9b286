//! The seam between a published version and whoever runs it.

use std::path::{Path, PathBuf};

use futures::future::BoxFuture;

use crate::vllm::{Client, ClientError};

/// What the receiver runs now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    pub version: String,
    /// None when the receiver cannot know better.
    pub checksum: Option<String>,
}

/// What a delivery cost, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Delivery {
    /// Reading and checking the weights, while requests go on.
    pub stage_ms: f64,
    /// Putting them in place; requests stand still for this long.
    pub commit_ms: f64,
}

/// Why a version could not be delivered.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SinkError {
    /// Down, restarting or slow: try again later.
    #[error("the server cannot be reached: {0}")]
    Unavailable(String),
    /// The server looked at this version and will not run it; it still runs the one before.
    #[error("the server refused the draft: {0}")]
    Refused(String),
    #[error(
        "the server has no draft route\nhint: install the vLLM plugin, or set publish.sink = \"folder\""
    )]
    NoRoute,
}

/// Where a new version goes. The version that runs is unchanged when a delivery fails.
pub trait DraftSink: Send + Sync {
    /// Asks what runs now.
    ///
    /// # Errors
    /// See [`SinkError`].
    fn running(&self) -> BoxFuture<'_, Result<Running, SinkError>>;

    /// Makes the receiver run a version from its folder, an absolute path.
    ///
    /// # Errors
    /// See [`SinkError`].
    fn deliver<'a>(
        &'a self,
        version: &'a str,
        folder: &'a Path,
    ) -> BoxFuture<'a, Result<Delivery, SinkError>>;

    /// Whether delivering means more than moving the `current` link.
    fn is_live(&self) -> bool {
        true
    }
}

/// Swaps through the server's draft route.
pub struct UpstreamSink {
    client: Client,
    /// The `drafts` folder as the server sees it, when that is another path.
    server_path: Option<PathBuf>,
}

impl UpstreamSink {
    pub fn new(client: Client, server_path: Option<PathBuf>) -> Self {
        Self { client, server_path }
    }
}

impl DraftSink for UpstreamSink {
    fn running(&self) -> BoxFuture<'_, Result<Running, SinkError>> {
        Box::pin(async {
            let info = self.client.draft().await.map_err(sink_error)?;
            Ok(Running { version: info.version, checksum: info.checksum })
        })
    }

    fn deliver<'a>(
        &'a self,
        version: &'a str,
        folder: &'a Path,
    ) -> BoxFuture<'a, Result<Delivery, SinkError>> {
        Box::pin(async move {
            let seen = match &self.server_path {
                Some(root) => root.join(version),
                None => folder.to_owned(),
            };
            let seen = seen.to_string_lossy();
            let reply = self.client.swap_draft(&seen, version).await.map_err(sink_error)?;
            Ok(Delivery { stage_ms: reply.stage_ms, commit_ms: reply.commit_ms })
        })
    }
}

fn sink_error(error: ClientError) -> SinkError {
    match error {
        ClientError::Refused { status: 404 | 405 | 501, .. } => SinkError::NoRoute,
        ClientError::Refused { .. } | ClientError::Unexpected { .. } => {
            SinkError::Refused(error.to_string())
        }
        ClientError::Unavailable { .. } | ClientError::BadUrl { .. } => {
            SinkError::Unavailable(error.to_string())
        }
    }
}

/// Leaves it to others to pick the version up from `drafts/current`.
pub struct FolderSink {
    drafts: PathBuf,
}

impl FolderSink {
    pub fn new(drafts: PathBuf) -> Self {
        Self { drafts }
    }
}

impl DraftSink for FolderSink {
    fn running(&self) -> BoxFuture<'_, Result<Running, SinkError>> {
        Box::pin(async {
            let link = self.drafts.join(super::publish::CURRENT_LINK);
            let target = tokio::fs::read_link(&link)
                .await
                .map_err(|error| SinkError::Unavailable(format!("{}: {error}", link.display())))?;
            Ok(Running { version: target.to_string_lossy().into_owned(), checksum: None })
        })
    }

    fn deliver<'a>(
        &'a self,
        _version: &'a str,
        _folder: &'a Path,
    ) -> BoxFuture<'a, Result<Delivery, SinkError>> {
        Box::pin(async { Ok(Delivery::default()) })
    }

    fn is_live(&self) -> bool {
        false
    }
}
