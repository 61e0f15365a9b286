//! Models in a Hugging Face repository: found, pinned to a commit, fetched into the hub's cache.

use std::path::{Path, PathBuf};

use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFClientSync, HFError};

use super::HubError;
use super::folder::COMPANIONS;
use super::safetensors::{INDEX_FILE, SINGLE_FILE, shard_names};
use crate::model::manifest::sha256_file;

/// Where the hub is and where its files are kept. What is not set here is taken from the
/// environment by the client.
#[derive(Debug, Clone, Default)]
pub struct HubSettings {
    /// Base URL, for a mirror.
    pub endpoint: Option<String>,
    /// Token for private and gated repositories; never logged. Without it the file that logging
    /// in wrote is used.
    pub token: Option<HubToken>,
    /// Folder of the cache, with one folder for each repository.
    pub cache: Option<PathBuf>,
    /// Use the cache only, never the network.
    pub offline: bool,
}

/// A secret that does not show itself when printed.
#[derive(Clone)]
pub struct HubToken(pub String);

impl std::fmt::Debug for HubToken {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("HubToken(…)")
    }
}

impl HubSettings {
    /// From `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_CACHE`, `HF_HOME` and `HF_HUB_OFFLINE`; an empty
    /// variable counts as one that is not set, which the client alone would not do.
    pub fn from_env() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let below = |name: &str, rest: &str| set(name).map(|folder| Path::new(&folder).join(rest));
        let cache = below("HF_HUB_CACHE", "")
            .or_else(|| below("HUGGINGFACE_HUB_CACHE", ""))
            .or_else(|| below("HF_HOME", "hub"))
            .or_else(|| below("XDG_CACHE_HOME", "huggingface/hub"))
            .or_else(|| below("HOME", ".cache/huggingface/hub"))
            .unwrap_or_else(|| std::env::temp_dir().join("huggingface/hub"));
        let offline = set("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_lowercase();
        Self {
            endpoint: Some(set("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_HUB.to_string())),
            token: set("HF_TOKEN").map(HubToken),
            cache: Some(cache),
            offline: matches!(offline.as_str(), "1" | "true" | "yes" | "on"),
        }
    }
}

const PUBLIC_HUB: &str = "https://huggingface.co";

/// A commit of a repository in the cache, with the files that a target needs.
pub(super) struct Snapshot {
    pub(super) folder: PathBuf,
    pub(super) commit: String,
}

/// Splits `owner/name@revision`; none when the text is not of that form.
pub(super) fn parse_name(spec: &str) -> Option<(&str, Option<&str>)> {
    let (repository, revision) = match spec.split_once('@') {
        Some((repository, revision)) => (repository, Some(revision)),
        None => (spec, None),
    };
    let (owner, name) = repository.split_once('/')?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_part =
        |part: &str| !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed);
    let is_file = name.ends_with(".gguf") || name.ends_with(".safetensors");
    // The revision becomes a path below the cache's folder.
    let revision_ok = revision.is_none_or(|revision| revision.split('/').all(is_part));
    (is_part(owner) && is_part(name) && !is_file && revision_ok).then_some((repository, revision))
}

/// Brings the files of a target into the cache. A repository whose hub cannot be reached is
/// taken from the cache when it is there.
pub(super) fn fetch(
    repository: &str,
    revision: Option<&str>,
    settings: &HubSettings,
) -> Result<Snapshot, HubError> {
    let hub = Hub::connect(repository, revision.unwrap_or("main"), settings)?;
    if settings.offline {
        return hub.cached().ok_or_else(|| {
            hub.error(
                format!("revision {} is not in the cache {}", hub.revision, hub.cache.display()),
                "HF_HUB_OFFLINE is set; fetch the model once with a network, or give its folder",
            )
        });
    }
    match hub.commit() {
        Ok(commit) => hub.download(commit),
        Err(error @ HFError::Request { .. }) => match hub.cached() {
            Some(snapshot) => {
                tracing::warn!(%error, repository, commit = snapshot.commit, "hub not reached; using the cache");
                Ok(snapshot)
            }
            None => Err(hub.explain(&error)),
        },
        Err(error) => Err(hub.explain(&error)),
    }
}

type ModelRepository = hf_hub::HFRepositorySync<hf_hub::RepoTypeModel>;

struct Hub<'a> {
    name: &'a str,
    revision: &'a str,
    repository: ModelRepository,
    endpoint: String,
    /// The repository's folder in the cache.
    cache: PathBuf,
}

/// A file of the repository as the hub lists it.
struct Listed {
    name: String,
    size: u64,
    sha256: Option<String>,
}

impl<'a> Hub<'a> {
    fn connect(name: &'a str, revision: &'a str, settings: &HubSettings) -> Result<Self, HubError> {
        let mut builder = HFClient::builder();
        if let Some(endpoint) = &settings.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(token) = &settings.token {
            builder = builder.token(&token.0);
        }
        if let Some(cache) = &settings.cache {
            builder = builder.cache_dir(cache);
        }
        let unusable = |error: HFError| HubError::Repository {
            repository: name.to_string(),
            what: format!("the hub's client cannot start: {error}"),
            hint: "check HF_ENDPOINT and the proxy variables".to_string(),
        };
        let client = builder.build().map_err(unusable)?;
        let endpoint = client.endpoint().to_string();
        let (owner, short) = hf_hub::split_id(name);
        let cache = client.cache_dir().join(format!("models--{owner}--{short}"));
        let client = HFClientSync::from_inner(client).map_err(unusable)?;
        Ok(Self { name, revision, repository: client.model(owner, short), endpoint, cache })
    }

    fn commit(&self) -> Result<String, HFError> {
        if is_commit(self.revision) {
            return Ok(self.revision.to_string());
        }
        let info = self.repository.info().revision(self.revision).send()?;
        info.sha.filter(|sha| is_commit(sha)).ok_or_else(|| {
            HFError::Other(format!("the hub names no commit for revision {}", self.revision))
        })
    }

    /// What the cache holds of the revision, when it holds a whole target.
    fn cached(&self) -> Option<Snapshot> {
        let commit = if is_commit(self.revision) {
            self.revision.to_string()
        } else {
            let reference = std::fs::read_to_string(self.cache.join("refs").join(self.revision));
            reference.ok()?.trim().to_string()
        };
        let folder = self.cache.join("snapshots").join(&commit);
        folder.join("config.json").is_file().then_some(Snapshot { folder, commit })
    }

    fn download(&self, commit: String) -> Result<Snapshot, HubError> {
        let listed = match self.list(&commit) {
            Ok(listed) => listed,
            Err(error @ HFError::Request { .. }) => {
                return self.cached().ok_or_else(|| self.explain(&error));
            }
            Err(error) => return Err(self.explain(&error)),
        };
        let find = |name: &str| listed.iter().find(|file| file.name == name);
        let mut wanted: Vec<&Listed> = Vec::new();
        if find("config.json").is_none() {
            return Err(self.error(
                "it has no config.json".to_string(),
                "name the repository of a Hugging Face model, not of a dataset or of GGUF files \
                 (download a .gguf file and give its path)",
            ));
        }
        wanted.extend(find("config.json"));
        wanted.extend(COMPANIONS.iter().filter_map(|name| find(name)));
        let folder = self.cache.join("snapshots").join(&commit);
        match (find(INDEX_FILE), find(SINGLE_FILE)) {
            (Some(index), _) => {
                self.download_file(&commit, &folder, index)?;
                let path = folder.join(INDEX_FILE);
                let text = std::fs::read(&path)
                    .map_err(|source| HubError::Read { path: path.clone(), source })?;
                for name in shard_names(&path, &text)? {
                    wanted.push(find(&name).ok_or_else(|| {
                        self.error(
                            format!("it lacks {name}, which {INDEX_FILE} lists"),
                            "the repository is incomplete; try another revision",
                        )
                    })?);
                }
            }
            (None, Some(single)) => wanted.push(single),
            (None, None) => {
                return Err(self.error(
                    "it has no weights in safetensors files".to_string(),
                    "this version reads model.safetensors; try another revision, for example a \
                 conversion under refs/pr/…",
                ));
            }
        }
        for file in wanted {
            self.download_file(&commit, &folder, file)?;
        }
        self.remember(&commit)?;
        Ok(Snapshot { folder, commit })
    }

    fn list(&self, commit: &str) -> Result<Vec<Listed>, HFError> {
        let entries = self.repository.list_tree().revision(commit).send()?;
        let file = |entry| match entry {
            RepoTreeEntry::File { path, size, lfs, .. } => {
                Some(Listed { name: path, size, sha256: lfs.and_then(|lfs| lfs.sha256) })
            }
            RepoTreeEntry::Directory { .. } => None,
        };
        Ok(entries.into_iter().filter_map(file).collect())
    }

    /// Downloads one file unless it is there, and checks its size and, for large files, its hash:
    /// the client stores whatever a mirror answers.
    fn download_file(&self, commit: &str, folder: &Path, file: &Listed) -> Result<(), HubError> {
        let path = folder.join(&file.name);
        let is_new = !path.exists();
        if is_new {
            tracing::info!(repository = self.name, file = file.name, bytes = file.size, "fetching");
            self.repository
                .download_file()
                .filename(&file.name)
                .revision(commit)
                .send()
                .map_err(|error| self.explain(&error))?;
        }
        let read_error = |source| HubError::Read { path: path.clone(), source };
        let size = std::fs::metadata(&path).map_err(read_error)?.len();
        let mut fault = (size != file.size)
            .then(|| format!("{} has {size} bytes, expected {}", file.name, file.size));
        if let (None, true, Some(expected)) = (&fault, is_new, &file.sha256) {
            let got = sha256_file(&path).map_err(read_error)?;
            fault = (&got != expected)
                .then(|| format!("{} has sha256 {got}, expected {expected}", file.name));
        }
        let Some(what) = fault else { return Ok(()) };
        // Neither the pointer nor the content may stay: the next run would trust them.
        if let Ok(blob) = path.canonicalize() {
            std::fs::remove_file(blob).map_err(read_error)?;
        }
        if path.symlink_metadata().is_ok() {
            std::fs::remove_file(&path).map_err(read_error)?;
        }
        Err(self.error(
            what,
            "the download was cut short or changed on its way and has been removed; run again",
        ))
    }

    /// Records which commit the revision was, so that it is found without a network.
    fn remember(&self, commit: &str) -> Result<(), HubError> {
        if is_commit(self.revision) {
            return Ok(());
        }
        let path = self.cache.join("refs").join(self.revision);
        let folder = path.parent().unwrap_or(&self.cache).to_path_buf();
        let write = || {
            std::fs::create_dir_all(&folder)?;
            let mut file = tempfile::NamedTempFile::new_in(&folder)?;
            std::io::Write::write_all(&mut file, commit.as_bytes())?;
            file.persist(&path).map(|_| ()).map_err(std::io::Error::from)
        };
        write().map_err(|source| HubError::Read { path: path.clone(), source })
    }

    fn error(&self, what: String, hint: &str) -> HubError {
        HubError::Repository { repository: self.name.to_string(), what, hint: hint.to_string() }
    }

    fn explain(&self, error: &HFError) -> HubError {
        let private = "check the spelling; for a private or gated repository accept its terms \
                       and set HF_TOKEN";
        match error {
            HFError::RepoNotFound { .. } => {
                self.error(format!("not found on {}", self.endpoint), private)
            }
            HFError::AuthRequired { .. } | HFError::Forbidden { .. } => {
                self.error(format!("{} refuses access", self.endpoint), private)
            }
            HFError::RevisionNotFound { revision, .. } => self.error(
                format!("it has no revision {revision}"),
                "name a branch, a tag or a full commit hash after @",
            ),
            HFError::EntryNotFound { path, .. } => {
                self.error(format!("it has no file {path}"), "try another revision")
            }
            HFError::RateLimited { .. } => {
                self.error(format!("{} limits requests", self.endpoint), "wait, or set HF_TOKEN")
            }
            HFError::Io(source) => self.error(
                format!("the cache {} cannot be written: {source}", self.cache.display()),
                "set HF_HOME to a folder with room that this user may write to",
            ),
            HFError::Request { .. } => self.error(
                format!("{} cannot be reached: {error}", self.endpoint),
                "check the network, HF_ENDPOINT and the proxy variables, or give a local folder",
            ),
            other => self.error(super::shorten(&other.to_string()), "try again later"),
        }
    }
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::parse_name;

    #[test]
    fn names_and_revisions_are_told_from_paths() {
        assert_eq!(parse_name("a/b"), Some(("a/b", None)));
        assert_eq!(parse_name("a-b/C.d_1@refs/pr/1"), Some(("a-b/C.d_1", Some("refs/pr/1"))));
        for path in [
            "b", "/a/b", "./a", "../a", "a/b/c", "a/b@", "a/b@../x", "a/b@/x", "a/", "a/m.gguf",
            "a b/c", "",
        ] {
            assert_eq!(parse_name(path), None, "{path}");
        }
    }
}
