// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"embed"
	"io/fs"
)

//go:embed model
var modelFiles embed.FS

// ModelCard is the model name in the registration of a simulated worker that uses [ModelFiles].
const ModelCard = "kvroute-sim"

// ModelFiles returns the files of the simulated engine's own model: a small
// tokenizer, trained on a page of text by tools/golden, and a chat template.
func ModelFiles() fs.FS {
	files, err := fs.Sub(modelFiles, "model")
	if err != nil {
		panic(err) // the name is a constant
	}
	return files
}
