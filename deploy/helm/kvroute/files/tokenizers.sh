# Downloads the files that kvroute needs to tokenize prompts, from a model repository in the form of Hugging Face's.
# Arguments: REPOSITORY@REVISION... Environment: ENDPOINT, FOLDER, FILES, and HF_TOKEN for private and gated models.
fetch() { # fetch URL FILE: prints the status of the response
  if [ -n "${HF_TOKEN:-}" ]; then
    printf 'header = "Authorization: Bearer %s"\n' "$HF_TOKEN" | curl -sSL --retry 5 -K - -o "$2" -w '%{http_code}' "$1"
  else
    curl -sSL --retry 5 -o "$2" -w '%{http_code}' "$1"
  fi
}
for model; do
  repository=${model%@*} revision=${model##*@} found=
  mkdir -p "$FOLDER/$repository"
  for file in $FILES; do
    target=$FOLDER/$repository/$file
    status=$(fetch "$ENDPOINT/$repository/resolve/$revision/$file" "$target.part")
    case $status in
    200) mv "$target.part" "$target" && found="$found $file" ;;
    404) rm -f "$target.part" ;;
    401 | 403)
      echo "$repository: $file: the server answers $status: name a Secret with a valid token in tokenizers.tokenSecret" >&2
      exit 1
      ;;
    *)
      echo "$repository: $file: the server answers $status" >&2
      exit 1
      ;;
    esac
  done
  if [ -z "$found" ]; then
    echo "$repository: the revision $revision has none of the files: $FILES" >&2
    exit 1
  fi
  echo "$repository:$found"
done
