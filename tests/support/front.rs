//! A proxy on a free port, with counters for what its observers were told.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use draft_adapter::sidecar::capture::{
    self, CaptureObserver, CaptureReceiver, CaptureSender, CaptureSettings, DraftVersion,
};
use draft_adapter::sidecar::proxy::{self, ProxyObserver, ProxySettings};
use draft_adapter::sidecar::render::Renderer;
use draft_adapter::sidecar::store::{MemoryStore, StoreLimits};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Everything that observers were told.
#[derive(Debug, Clone, Default)]
pub struct Told {
    pub started: u64,
    pub finished: Vec<u16>,
    pub upstream_errors: u64,
    pub captured: Vec<String>,
    pub dropped: BTreeMap<&'static str, u64>,
    pub opted_out: u64,
    pub overheads: Vec<f64>,
}

#[derive(Default)]
pub struct Observer(Mutex<Told>);

impl ProxyObserver for Observer {
    fn started(&self) {
        self.0.lock().started += 1;
    }
    fn finished(&self, status: u16, overhead_seconds: f64) {
        let mut told = self.0.lock();
        told.finished.push(status);
        told.overheads.push(overhead_seconds);
    }
    fn upstream_error(&self) {
        self.0.lock().upstream_errors += 1;
    }
}

impl CaptureObserver for Observer {
    fn captured(&self, domain: &str) {
        self.0.lock().captured.push(domain.into());
    }
    fn dropped(&self, reason: &'static str) {
        *self.0.lock().dropped.entry(reason).or_default() += 1;
    }
    fn opted_out(&self) {
        self.0.lock().opted_out += 1;
    }
}

/// A proxy with capture into a store in memory.
pub struct Front {
    pub addr: SocketAddr,
    pub store: Arc<MemoryStore>,
    pub draft_version: DraftVersion,
    observer: Arc<Observer>,
    tasks: Vec<JoinHandle<()>>,
}

impl Front {
    pub async fn start(upstream: SocketAddr) -> Self {
        Self::with(upstream, Renderer::none(), CaptureSettings::default(), |_| {}).await
    }

    pub async fn with(
        upstream: SocketAddr,
        renderer: Renderer,
        settings: CaptureSettings,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let (sender, receiver) = capture::channel(64);
        let mut front = Self::without_capture(upstream, sender, change).await;
        front.capture(receiver, renderer, settings);
        front
    }

    /// The proxy alone; the caller keeps the other end of the capture queue.
    pub async fn without_capture(
        upstream: SocketAddr,
        sender: CaptureSender,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let observer = Arc::new(Observer::default());
        let mut settings = ProxySettings::new(format!("http://{upstream}").parse().unwrap());
        change(&mut settings);
        let router = proxy::router(settings, sender, observer.clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let serving = tokio::spawn(proxy::serve(listener, router, std::future::pending()));
        let store = Arc::new(MemoryStore::new(StoreLimits::default()));
        Self { addr, store, draft_version: Arc::default(), observer, tasks: vec![serving] }
    }

    pub fn capture(
        &mut self,
        receiver: CaptureReceiver,
        renderer: Renderer,
        settings: CaptureSettings,
    ) {
        self.tasks.push(tokio::spawn(capture::run(
            receiver,
            Arc::new(renderer),
            self.store.clone(),
            settings,
            self.observer.clone(),
            self.draft_version.clone(),
            std::future::pending(),
        )));
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn told(&self) -> Told {
        self.observer.0.lock().clone()
    }

    /// Waits until what observers were told satisfies `condition`.
    pub async fn until(&self, what: &str, condition: impl Fn(&Told) -> bool) -> Told {
        eventually(what, || Some(self.told()).filter(&condition)).await
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Polls until `value` gives something, for at most 30 seconds.
pub async fn eventually<T>(what: &str, value: impl Fn() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(value) = value() {
            return value;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within 30 seconds: {what}");
}
