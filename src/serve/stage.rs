//! Reading a draft folder and checking that it can take the running draft's place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::drafts::DraftError;
use crate::hub::{Target, Weights};
use crate::model::runtime::Runtime;
use crate::model::{DraftManifest, ModelConfig, Tokenizer, manifest};
use crate::speculate::decode::Draft;
use crate::speculate::translate::Translated;
use crate::vocab::TokenMap;

/// A draft as this server runs it.
pub(super) type ServedDraft = Draft<Translated<Runtime>>;

/// What every draft of this server must agree with.
pub(super) struct Fitting {
    /// Folder that drafts may come from, canonical.
    pub root: PathBuf,
    pub config: ModelConfig,
    /// Shape of every tensor of the draft that the server was started with.
    pub shapes: BTreeMap<String, Vec<usize>>,
}

impl Fitting {
    pub fn of(root: &Path, draft: &Target) -> Result<Self, DraftError> {
        let root = canonical(root)?;
        Ok(Self { root, config: draft.config.clone(), shapes: shapes(&draft.weights) })
    }

    /// Loads the folder, or says why it does not fit.
    pub fn stage(
        &self,
        path: &Path,
        version: Option<&str>,
        target_vocabulary: &Tokenizer,
    ) -> Result<ServedDraft, DraftError> {
        let path = canonical(path)?;
        if !path.starts_with(&self.root) {
            return Err(DraftError::OutsideRoot {
                path: path.display().to_string(),
                root: self.root.display().to_string(),
            });
        }
        let (manifest_version, checksum) = read_manifest(&path)?;
        if let (Some(wanted), Some(found)) = (version, &manifest_version) {
            expect_equal("version", wanted, found)?;
        }
        let draft = open(&path)?;
        self.check(&draft)?;
        let model = load(&path, &draft, target_vocabulary)?;
        let version = version.map(str::to_owned).or(manifest_version);
        let version = version.unwrap_or_else(|| folder_name(&path));
        Ok(Draft { model, version, checksum, path })
    }

    fn check(&self, draft: &Target) -> Result<(), DraftError> {
        let (want, got) = (&self.config, &draft.config);
        expect_equal("architecture", want.family.architecture(), got.family.architecture())?;
        let sizes = |c: &ModelConfig| {
            [
                ("vocab_size", c.vocab_size),
                ("hidden_size", c.hidden_size),
                ("intermediate_size", c.intermediate_size),
                ("num_hidden_layers", c.num_hidden_layers),
                ("num_attention_heads", c.num_attention_heads),
                ("num_key_value_heads", c.num_key_value_heads),
                ("head_dim", c.head_dim),
            ]
        };
        for ((name, want), (_, got)) in sizes(want).into_iter().zip(sizes(got)) {
            expect_equal(name, &want, &got)?;
        }
        let found = shapes(&draft.weights);
        for (name, shape) in &self.shapes {
            match found.get(name) {
                Some(got) => expect_equal(&format!("shape of {name}"), &Shape(shape), &Shape(got))?,
                None => return Err(mismatch("tensor", name, "nothing")),
            }
        }
        match found.keys().find(|name| !self.shapes.contains_key(*name)) {
            Some(extra) => Err(mismatch("tensors", "those of the startup draft", extra)),
            None => Ok(()),
        }
    }
}

/// Loads the draft that the server starts with; `path` is canonical.
pub(super) fn startup(
    path: &Path,
    draft: &Target,
    target_vocabulary: &Tokenizer,
) -> Result<ServedDraft, DraftError> {
    let (version, checksum) = read_manifest(path)?;
    let version = version.unwrap_or_else(|| "startup".to_owned());
    let model = load(path, draft, target_vocabulary)?;
    Ok(Draft { model, version, checksum, path: path.to_path_buf() })
}

/// Opens a draft folder.
pub(super) fn open(path: &Path) -> Result<Target, DraftError> {
    Target::open(&path.display().to_string())
        .map_err(|error| DraftError::Unreadable(error.to_string()))
}

/// The table of the draft's ids where the folder has one; without it, both tokenizers must give
/// every id the same meaning.
fn translation(
    path: &Path,
    draft: &Target,
    target: &Tokenizer,
) -> Result<Option<TokenMap>, DraftError> {
    let (rows, ids) = (draft.config.vocab_size, draft.tokenizer.vocab_size());
    if rows < ids {
        return Err(mismatch("vocab_size", &format!("at least {ids}"), &rows.to_string()));
    }
    let table = TokenMap::of_folder(path, &draft.tokenizer, target)?;
    if table.is_none() {
        check_vocabulary(&draft.tokenizer, target)?;
    }
    Ok(table)
}

/// Whether both tokenizers give every id the same meaning.
fn check_vocabulary(draft: &Tokenizer, target: &Tokenizer) -> Result<(), DraftError> {
    expect_equal("tokens in the vocabulary", &target.vocab_size(), &draft.vocab_size())?;
    for id in 0..target.vocab_size() as u32 {
        let (want, got) = (target.piece(id), draft.piece(id));
        if want != got {
            let show = |piece: Option<String>| piece.map_or("nothing".into(), |p| format!("{p:?}"));
            return Err(mismatch(&format!("token {id}"), &show(want), &show(got)));
        }
    }
    Ok(())
}

/// The folder's real path.
pub(super) fn canonical(path: &Path) -> Result<PathBuf, DraftError> {
    std::fs::canonicalize(path).map_err(|error| DraftError::Missing {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

fn read_manifest(path: &Path) -> Result<(Option<String>, Option<String>), DraftError> {
    if !path.join(manifest::MANIFEST_FILE).exists() {
        return Ok((None, None));
    }
    let unreadable = |error: manifest::ManifestError| DraftError::Unreadable(error.to_string());
    let manifest = DraftManifest::read(path).map_err(unreadable)?;
    manifest.verify(path).map_err(unreadable)?;
    let checksum = manifest.checksum();
    Ok((Some(manifest.version), Some(checksum)))
}

fn load(
    path: &Path,
    draft: &Target,
    target_vocabulary: &Tokenizer,
) -> Result<Translated<Runtime>, DraftError> {
    let map = translation(path, draft, target_vocabulary)?;
    // Also refuses values that are not finite.
    let model = Runtime::load(&draft.config, &draft.weights)
        .map_err(|error| DraftError::Unreadable(error.to_string()))?;
    Ok(Translated { model, map })
}

fn shapes(weights: &Weights) -> BTreeMap<String, Vec<usize>> {
    let names = weights.names().into_iter();
    names.filter_map(|name| weights.shape(&name).map(|shape| (name, shape))).collect()
}

struct Shape<'a>(&'a [usize]);

impl std::fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl PartialEq for Shape<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

fn expect_equal<T: PartialEq + std::fmt::Display + ?Sized>(
    what: &str,
    expected: &T,
    got: &T,
) -> Result<(), DraftError> {
    if expected == got {
        return Ok(());
    }
    Err(mismatch(what, &expected.to_string(), &got.to_string()))
}

fn mismatch(what: &str, expected: &str, got: &str) -> DraftError {
    DraftError::Mismatch {
        what: what.to_owned(),
        expected: expected.to_owned(),
        got: got.to_owned(),
    }
}

fn folder_name(path: &Path) -> String {
    path.file_name().map_or_else(|| "unnamed".into(), |name| name.to_string_lossy().into_owned())
}
