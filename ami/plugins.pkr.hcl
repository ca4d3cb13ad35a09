# The Packer and the plugin with which images are built.
packer {
  required_version = ">= 1.10.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "= 1.3.9" # packer-amazon in versions.yaml
    }
  }
}
