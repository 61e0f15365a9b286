//! From settings to the parts that the sidecar is put together from.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::RunError;
use crate::config::sidecar::{SidecarSettings, StoreKind, TeacherKind, seconds};
use crate::sidecar::publish::{FolderError, WorkDir};
use crate::sidecar::store::{MemoryStore, RedbStore, SampleStore, StoreError, StoreLimits};
use crate::sidecar::upstream::TargetNames;
use crate::sidecar::versions::{FIRST_VERSION, Ledger};
use crate::sidecar::{capture, proxy};

pub(super) async fn bind(
    key: &'static str,
    address: &str,
) -> Result<(TcpListener, SocketAddr), RunError> {
    let failed = |reason| RunError::Bind { key, address: address.to_owned(), reason };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

pub(super) fn api_key(settings: &SidecarSettings) -> Option<String> {
    let key = &settings.upstream.api_key;
    (!key.is_empty()).then(|| key.clone())
}

/// Reads the ledger, or imports the first version, and brings folders in line.
pub(super) fn open_ledger(work: &WorkDir, draft: &Path) -> Result<Ledger, FolderError> {
    work.remove_leftovers()?;
    let mut ledger = match Ledger::load(work.root())? {
        Some(ledger) => ledger,
        None => {
            let manifest = match work.whole(FIRST_VERSION) {
                // Killed between the import and the first ledger.
                Some(manifest) => manifest,
                None => work.import(draft)?,
            };
            tracing::info!(draft = %draft.display(), "imported as {FIRST_VERSION}");
            let mut ledger =
                Ledger::first(manifest.checksum(), manifest.created_unix, manifest.data_hash);
            ledger.next = work.next_number()?;
            ledger
        }
    };
    work.recover(&mut ledger)?;
    ledger.save(work.root())?;
    Ok(ledger)
}

pub(super) fn open_store(
    settings: &SidecarSettings,
    work: &WorkDir,
) -> Result<Arc<dyn SampleStore>, StoreError> {
    let limits = StoreLimits {
        max_samples: settings.store.max_samples,
        max_bytes: settings.store.max_bytes,
    };
    Ok(match settings.store.kind {
        StoreKind::Memory => Arc::new(MemoryStore::new(limits)),
        StoreKind::Disk => Arc::new(RedbStore::open(&work.root().join("store.redb"), limits)?),
    })
}

pub(super) fn proxy_settings(settings: &SidecarSettings) -> Result<proxy::ProxySettings, RunError> {
    let upstream: http::Uri = settings
        .upstream
        .url
        .parse()
        .map_err(|_| proxy::ProxyError::Upstream { got: settings.upstream.url.clone() })?;
    Ok(proxy::ProxySettings {
        denied_paths: settings.proxy.deny.clone(),
        max_request_bytes: settings.proxy.max_request_bytes,
        max_response_bytes: settings.proxy.max_response_bytes,
        connect_timeout: seconds(settings.proxy.connect_timeout_seconds),
        ..proxy::ProxySettings::new(upstream)
    })
}

pub(super) fn capture_settings(
    settings: &SidecarSettings,
    names: TargetNames,
) -> capture::CaptureSettings {
    let keys = &settings.capture;
    capture::CaptureSettings {
        held_out_every: keys.held_out_every,
        max_prompt_tokens: keys.max_prompt_tokens,
        min_output_tokens: keys.min_output_tokens,
        max_output_tokens: keys.max_output_tokens,
        default_temperature: keys.default_temperature as f32,
        sample_rate: keys.sample_rate,
        use_live_logprobs: settings.teacher.kind == TeacherKind::Live,
        models: names,
        ..capture::CaptureSettings::default()
    }
}
