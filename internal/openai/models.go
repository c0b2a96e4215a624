// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/router"
)

// modelsPath is the path of the list of models. Below it are the single models.
const modelsPath = "/v1/models"

// mostListed limits the names in a list of models, so that the answer has at most a few MB.
const mostListed = 10_000

// ModelsPath reports whether a request asks for the list of models, name "", or for one model. It compares the path as
// [Classify] does. A name may contain slashes.
func ModelsPath(method, target string) (name string, asks bool) {
	if method != http.MethodGet || !strings.Contains(target, "models") {
		return "", false
	}
	p := normalPath(target)
	return strings.TrimPrefix(strings.TrimPrefix(p, modelsPath), "/"), isModelsPath(p)
}

func isModelsPath(p string) bool { return p == modelsPath || strings.HasPrefix(p, modelsPath+"/") }

// listedModel is a model in the form of OpenAI's API, with vLLM's additions.
type listedModel struct {
	ID          string  `json:"id"`
	Object      string  `json:"object"`
	Created     int64   `json:"created"`
	OwnedBy     string  `json:"owned_by"`
	Root        string  `json:"root"`
	Parent      *string `json:"parent"`
	MaxModelLen int     `json:"max_model_len,omitempty"`
}

func listed(m *router.ServedModel) listedModel {
	l := listedModel{
		ID: m.Name, Object: "model", Created: m.Since.Unix(), OwnedBy: "kvroute", Root: m.Name, MaxModelLen: m.MaxModelLen,
	}
	if m.Adapter {
		l.Parent = &m.Model
	} else {
		l.Root = m.Model
	}
	return l
}

// ModelList is the answer to a request for the list of models: at most the first 10,000.
func ModelList(models []router.ServedModel) []byte {
	list := make([]listedModel, 0, len(models))
	for i := range models[:min(len(models), mostListed)] {
		list = append(list, listed(&models[i]))
	}
	text, _ := json.Marshal(map[string]any{"object": "list", "data": list}) // texts and numbers always marshal
	return text
}

// OneModel is the answer to a request for one model, or the error for an unknown one.
func OneModel(models []router.ServedModel, name string) ([]byte, *Error) {
	at := slices.IndexFunc(models, func(m router.ServedModel) bool { return m.Name == name })
	if at < 0 {
		return nil, UnknownModel(name)
	}
	text, _ := json.Marshal(listed(&models[at]))
	return text, nil
}
